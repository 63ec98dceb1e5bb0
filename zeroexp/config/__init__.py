"""Every word an experiment may say, as plain data and registries.

keys.py            the keys, as dataclasses, and how they become a run's config.yaml
families.py        what `model.family` may name; data_kinds.py: `data.kind`; engines.py: native engines, of which
                   deepspeed_settings.py says what DeepSpeed's may be asked; optimizer.py: `optimizer.name`;
                   parameter_kinds.py: rows of `optimizer.kinds`; gpus.py: GPUs and networks of plans
parameter_groups.py which parameters are stepped alike, and which have no weight decay
plugins.py         code that others add: the modules of `plugins=[...]`, and the settings of their words
job_shape.py       how the ranks of a point share nodes
data_splits.py     which local files are trained on, which validated on; vocabulary.py: the tokenizer, and its size
cache_folder.py    where packed data and helpers that were compiled are kept
"""
