"""Models to train, each built from a `ModelConfig` with the names of its repeated blocks.

module.py                     the only entry point: a module on meta, whole, or with its values to come; what is frozen
deferred.py                   values that a constructor draws, drawn after it has run, one parameter at a time
mlp.py, moe.py                our own families: the residual MLP of the memory table, experts that are not run unused
huggingface.py                the families of transformers
blocks.py, checkpointing.py   what moves together, is recomputed
expert_kernels.py             which of torch's products multiplies the experts of transformers
lora.py, quantized.py         adapters of peft; the weights that they lie around, in int8
loss.py, flops.py             the loss of each task; operations of one sample

Of a published model, in the order in which its questions come:

published_config.py           config.json, which becomes part of the run's config
find_weights.py               the folder, here, in a cache or on the hub
huggingface_keys.py           which keys a family knows and uses
read_weight_files.py          names and shapes of the files' tensors, and ranges of their values
huggingface_tensor_names.py   under which names and in which parts a parameter is published
huggingface_weights_check.py  are they the weights of exactly this model?
huggingface_weights_read.py   the values that a rank holds
huggingface_folder.py         a folder of weights is written
"""
