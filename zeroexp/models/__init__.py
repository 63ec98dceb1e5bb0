"""Models to train, each built from a `ModelConfig` with the names of its repeated blocks.

`build.build_model` is the one way in. Families of transformers come through `huggingface.py`; `mlp.py` is the
residual MLP of the memory table, `moe.py` a mixture of experts whose unused experts do not run at all. Parameters
are the same on every rank: either drawn from the run's seed, or read from a folder or the hub.
"""
