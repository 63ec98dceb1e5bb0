"""Checkpoints of other trainers: brought into one of ours with weights and moments, and written from one of ours.

    foreign_checkpoint.py  what a folder of theirs holds: names, shapes, dtypes, and what reads one into a given tensor
    matching.py         which of it is which tensor of the configured model; what is missing, too many or another's
    into_checkpoint.py  writes one of ours: its file is mapped, and each tensor read to its place
    dcp.py              torch.distributed.checkpoint, as FSDP2 trainers use it: in and out
    megatron.py         Megatron-LM's names in the same format, and rows of its fused tensors: in
    megatron_writer.py  the same, out
    deepspeed_zero.py   DeepSpeed's ZeRO-1, ZeRO-2 and ZeRO-3, read without DeepSpeed: in
    deepspeed_universal.py  its universal form, which any stage and number of ranks reads: in and out
    __main__.py         `zeroexp import`; zeroexp/export.py writes

A format is one file and one row below. Two tensors at most are in memory at a time: one of theirs, and one of ours.
"""

from __future__ import annotations

from zeroexp.registry import Later

# Name of a format -> whether a folder is of it, and what reads it: (folder, names of the model's tensors) -> a
# ForeignCheckpoint.
READERS = {
    "dcp": (Later("zeroexp.foreign.dcp:is_dcp"), Later("zeroexp.foreign.dcp:read_dcp")),
    "deepspeed": (
        Later("zeroexp.foreign.deepspeed_zero:is_deepspeed"),
        Later("zeroexp.foreign.deepspeed_zero:read_deepspeed"),
    ),
    "universal": (
        Later("zeroexp.foreign.deepspeed_universal:is_universal"),
        Later("zeroexp.foreign.deepspeed_universal:read_universal"),
    ),
}
# Name of a format -> what fills an empty folder from a checkpoint of ours: (folder, config, manifest, tensors)
WRITERS = {
    "dcp": Later("zeroexp.foreign.dcp:write_dcp"),
    "deepspeed": Later("zeroexp.foreign.deepspeed_universal:write_universal"),
    "megatron": Later("zeroexp.foreign.megatron_writer:write_megatron"),
}
