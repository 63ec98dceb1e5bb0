"""Where each key that changes training shows: `zeroexp --help KEY` says it.

tests/test_keys_take_effect.py changes every key here under every engine, and requires that this differs between the two
values, or that the combination is refused in one line. It reads what tensors and backends really get: storages, what
torch.distributed is called with, operations as torch dispatches them, and the bits of losses and states after training.
"""

from __future__ import annotations

HELD = "bytes held"  # model states at the four moments of a step, by kind
SENT = "bytes sent"  # every collective with its dtype and bytes, in any order
OPERATIONS = "operations"  # every operator and collective of a step, in order
NUMBERS = "numbers"  # losses, norms, weights and moments of real ranks, bit for bit
TABLES = "tables and folders"  # a name, which changes nothing of what is trained
OTHERS = "what others read"  # refused without the plugin, engine or folder whose it is

# Key -> (where a change of it shows, what changes there). A key of these groups without a row fails the test.
WITNESSES: dict[str, tuple[str, str]] = {
    "strategy.name": (HELD, "where the three states rest"),
    "strategy.parameters.placement": (HELD, "parameters: whole, or this rank's pieces"),
    "strategy.parameters.dtype": (HELD, "parameters at rest"),
    "strategy.gradients.placement": (HELD, "gradients after backward"),
    "strategy.gradients.dtype": (SENT, "reductions"),
    "strategy.optimizer.placement": (
        HELD,
        "the optimizer's state: whole, or of this rank's pieces",
    ),
    "strategy.optimizer.dtype": (HELD, "master weights and moments"),
    "strategy.optimizer.over": (HELD, "master weights and moments: K times fewer"),
    "strategy.implementation": (OPERATIONS, "how parameters are cut, and packed to be sent"),
    "strategy.unit": (SENT, "how many gathers and reductions, of how many bytes each"),
    "strategy.overlap": (OPERATIONS, "gathers start a unit ahead, reductions end later"),
    "strategy.owners": (HELD, "which whole parameters this rank owns"),
    "strategy.prefetch": (OPERATIONS, "how many units ahead a gather starts"),
    "strategy.keep": (SENT, "gathers in backward"),
    "strategy.reduce_each": (SENT, "one reduction for each microbatch, or for each step"),
    "strategy.publish": (OPERATIONS, "weights arrive in forward, and not before the step ends"),
    "strategy.bucket_mb": (SENT, "how many reductions, of how many bytes each"),
    "strategy.replicas": (HELD, "K times the pieces"),
    "strategy.secondary_partition": (SENT, "gathers after the first of a step, inside of a node"),
    "strategy.outer.every": (HELD, "weights before the interval, and the outer momentum"),
    "strategy.outer.lr": (NUMBERS, "every outer step"),
    "strategy.outer.momentum": (NUMBERS, "every outer step; 0 keeps none"),
    "strategy.gather_codec": (SENT, "gathers, in fewer bytes"),
    "strategy.reduce_codec": (SENT, "reductions, in fewer bytes"),
    "strategy.error_feedback": (HELD, "what rounding has left out, as buffers"),
    "strategy.matrix_step": (SENT, "what brings matrices together before their step"),
    "strategy.offload": (HELD, "masters and moments count on the host"),
    "strategy.offload_fraction": (HELD, "a part of them stays on the device"),
    "strategy.offload_folder": (HELD, "masters and moments count in files"),
    "strategy.gradient_as_bucket_view": (OPERATIONS, "copies between gradients and DDP's buckets"),
    "strategy.settings": (OTHERS, "what the engine makes of them"),
    "precision.name": (TABLES, "the precision's column"),
    "precision.compute": (HELD, "parameters at rest (under FSDP2: what is gathered)"),
    "precision.reduce": (SENT, "reductions"),
    "precision.master": (HELD, "master weights and moments"),
    "precision.autocast": (OPERATIONS, "casts around matrix products"),
    "optimizer.name": (HELD, "as many moments as it keeps"),
    "optimizer.lr": (NUMBERS, "every update"),
    "optimizer.betas": (NUMBERS, "moments"),
    "optimizer.eps": (NUMBERS, "every update"),
    "optimizer.momentum": (NUMBERS, "moments"),
    "optimizer.moments": (HELD, "moments"),
    "optimizer.weight_decay": (NUMBERS, "every update"),
    "optimizer.decay_norms_and_biases": (NUMBERS, "norms and biases"),
    "optimizer.fused": (OPERATIONS, "one fused update, or torch's loop over tensors"),
    "optimizer.max_grad_norm": (NUMBERS, "gradients whose norm is larger"),
    "optimizer.schedule": (NUMBERS, "updates after warm-up"),
    "optimizer.warmup_steps": (NUMBERS, "the first updates"),
    "optimizer.min_lr_ratio": (NUMBERS, "the last updates"),
    "optimizer.settings": (NUMBERS, "what the optimizer makes of them"),
    "optimizer.kinds": (NUMBERS, "updates of the parameters of its rows"),
    "model.name": (TABLES, "the model's column"),
    "model.family": (HELD, "all states"),
    "model.task": (OPERATIONS, "the head and the loss"),
    "model.num_labels": (HELD, "the head's states"),
    "model.hf_config": (HELD, "all states"),
    "model.mlp": (HELD, "all states"),
    "model.moe": (HELD, "all states"),
    "model.weights": (NUMBERS, "the first loss, and all after it"),
    "model.freeze": (HELD, "gradients, masters and moments"),
    "model.lora.r": (HELD, "gradients, masters and moments are the adapters'"),
    "model.lora.lora_alpha": (NUMBERS, "losses once adapters are not 0 any more"),
    "model.lora.use_rslora": (NUMBERS, "losses once adapters are not 0 any more"),
    "model.lora.target_modules": (HELD, "adapters"),
    "model.lora.layers_to_transform": (HELD, "adapters"),
    "model.lora.modules_to_save": (HELD, "gradients, masters and moments"),
    "model.lora.quantize": (HELD, "parameters at rest"),
    "model.path": (HELD, "all states"),
    "model.init": (NUMBERS, "the first loss, and all after it"),
    "model.blocks": (
        SENT,
        "gathers and reductions (under DDP: which blocks are recomputed or compiled)",
    ),
    "model.published": (OTHERS, "the config.json of model.path"),
    "model.settings": (OTHERS, "what the family makes of them"),
}
