"""Suggestions for a wrong word: the nearest names that exist, and ours for words of other projects.

Words of others are answered, never obeyed, so that each thing has one name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

BATCH = "use data.global_batch_size (all ranks, one step) and data.micro_batch_size (one pass)"
FSDP2 = "use strategy=zero3 strategy.implementation=torch, which is PyTorch's FSDP2"
NO_SUCH_PARALLELISM = (
    "there is no such parallelism, batches and states are split: use world_size and strategy=zero3"
)
MIXED = "use precision=bf16_master (ours, FSDP2) or precision=autocast (torch's ddp and zero1)"

# A key -> what to use -> the words of others for it, without their signs. Words that are close to ours need no row.
WORDS = {
    "strategy": {
        FSDP2: "fsdp fsdp2 fullyshard",
        "use strategy=zero3 strategy.replicas=2, for two groups that shard inside": (
            "hsdp hybrid hybridshard mics"
        ),
        "use strategy=zero2 strategy.implementation=deepspeed (or zero1, zero3)": "deepspeed",
        "use strategy=ddp": "0 stage0",
        "use strategy=zero1, zero2 or zero3": "1 2 3 stage1 stage2 stage3",
    },
    "strategy.implementation": {
        FSDP2: "fsdp fsdp2",
        "use deepspeed": "ds",
    },
    "optimizer": {
        "use optimizer=adamw (with optimizer.weight_decay=0 it is Adam)": "adam",
        "use optimizer=sgd optimizer.momentum=0.9": "momentum",
    },
    "precision": {"use precision=fp16_master": "fp16 float16", MIXED: "amp mixed"},
    "data": {
        "use data=hf data.path=... with such a file or a folder of them": (
            "csv tsv json jsonl parquet"
        ),
        "use data=hf data.path=... with its id on the hub": (
            "hub huggingface datasets imdb wikitext openwebtext c4"
        ),
        "use data=offline data.path=... with a .txt file": "txt text",
    },
}
# What to use -> the keys of others for it, without their signs.
KEYS = {
    "use optimizer.lr": "lr learningrate",
    BATCH: "batchsize batch globalbatchsize",
    f"it follows from others: {BATCH}": "gradientaccumulationsteps accumulation",
    "use train.steps": "steps maxsteps numsteps iterations",
    "runs are counted in steps: use train.steps": "epochs numepochs",
    "use data=hf data.path=..., or another data=": "dataset datasetname",
    "use data.path (with data=hf)": "file files datafiles trainfile",
    "use data.text_column": "column textfield datasettextfield",
    "use data.seq_len": "seqlen seqlength blocksize contextlength",
    "use world_size": "gpus ngpus nproc nprocpernode worldsize ranks",
    "use world_size and cluster.slurm.ranks_per_node": "nodes nnodes",
    "use cluster.slurm.* of that name": "partition account qos constraint",
    "use cluster.timeout_s": "time timelimit",
    "use precision=bf16_master, or another precision": "dtype bf16 fp16",
    "use strategy=zero1, zero2 or zero3": "zerostage stage zerooptimization",
    "true is strategy=zero3, false strategy.keep=all (with strategy.implementation=torch strategy=zero2), a number is "
    "strategy.secondary_partition": "reshardafterforward",
    "use strategy.publish=forward (zero1, zero2), or strategy.prefetch (zero3)": (
        "overlapparamgather overlapparamsync"
    ),
    "use strategy.overlap": "overlapgradreduce overlapcomm",
    NO_SUCH_PARALLELISM: (
        "tp tpsize tpdegree tensorparallel tensorparallelsize tensorparalleldegree "
        "tensormodelparallelsize pp ppsize ppdegree pipelineparallel pipelineparallelsize "
        "pipelineparalleldegree pipelinemodelparallelsize cp cpsize contextparallel "
        "contextparallelsize ep epsize expertparallel expertparallelsize sequenceparallel"
    ),
    "use train.activation_checkpointing": "gradientcheckpointing",
    "use optimizer.max_grad_norm": "maxgradnorm gradclip clip",
    "use checkpoint.every": "checkpoint saveevery savesteps",
    "use tracking=mlflow or tracking=files": "mlflow tracker",
}


def did_you_mean(given: object, names: Iterable[str], *, most: int = 1) -> str:
    """Return the question whether names close to the given one were meant; empty where none is close."""
    close = get_close_matches(str(given), list(names), n=most, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else ""


def suggest_nearest(given: object, names: Iterable[str]) -> str:
    """Return the name that was probably intended, then all names."""
    names = list(names)
    return f"{did_you_mean(given, names)} use one of {', '.join(names)}".lstrip()


def suggest_word(key: str, word: object, options: Iterable[str]) -> str:
    """Return what to use for this value of a key: ours for a word of another project, else the nearest."""
    plain, options = _plain(str(word)), list(options)
    for option in options:
        if _plain(option) == plain:
            return f"use {option}"
    ours = _ours(plain, WORDS.get(key.removesuffix(".name"), {}))
    return ours or suggest_nearest(word, options)


def suggest_key(key: str, names: Iterable[str]) -> str:
    """Return what to use for a key that does not exist: ours for one of another project, else the nearest."""
    if remedy := _ours(_plain(key.rpartition(".")[2]), KEYS):
        return remedy
    return f"{did_you_mean(key, names, most=3)} `zeroexp --cfg job` shows them all".lstrip()


def _ours(word: str, remedies: Mapping[str, str]) -> str | None:
    return next((remedy for remedy, words in remedies.items() if word in words.split()), None)


def _plain(word: str) -> str:
    return re.sub(r"[-_ .]", "", word).lower()
