"""Models to train, each built from a `ModelConfig` with the names of its repeated blocks.

`build.build_model` is the only entry point. `huggingface.py` builds the families of transformers. `mlp.py` is the
residual MLP of the memory table. `moe.py` is a mixture of experts that does not run unused experts at all. Parameters
are the same on every rank: they are drawn from the run's seed, or read from a folder or the hub. `deferred.py` draws
them after the constructor has run, one at a time, and `huggingface_weights_read.py` reads them so.
"""
