"""Suggestions for a wrong word: the nearest names that exist, and ours for words of other projects.

Words of others are answered, never obeyed, so that each thing has one name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

FSDP2 = "use strategy=zero3 strategy.implementation=torch, which is PyTorch's FSDP2"
HYBRID = "there is no hybrid sharding: use strategy=zero3, or strategy=zero2 for less traffic"
MIXED = "use precision=bf16_master (ours, FSDP2) or precision=autocast (torch's ddp and zero1)"
BATCH = "use data.global_batch_size (all ranks, one step) and data.micro_batch_size (one pass)"
OR_ANY = "or any model of transformers with model=hf model.path=..."

# (key, word without its signs) -> what to use
WORDS = {
    **dict.fromkeys((("strategy", word) for word in ("fsdp", "fsdp2", "fullyshard")), FSDP2),
    **dict.fromkeys((("strategy.implementation", word) for word in ("fsdp", "fsdp2")), FSDP2),
    **dict.fromkeys((("strategy", word) for word in ("hsdp", "hybrid", "hybridshard")), HYBRID),
    ("strategy", "dp"): "use strategy=ddp",
    ("strategy", "dataparallel"): "use strategy=ddp",
    ("strategy", "zero0"): "use strategy=ddp: ZeRO-0 shards nothing",
    ("strategy", "zero"): "use strategy=zero1, zero2 or zero3",
    ("strategy", "deepspeed"): "use strategy=zero1, zero2 or zero3; DeepSpeed itself is not run",
    ("strategy", "zero++"): "use strategy=zero3, without quantized messages",
    ("strategy.implementation", "pytorch"): "use torch",
    ("strategy.implementation", "native"): "use torch",
    ("strategy.implementation", "deepspeed"): "not available yet; use torch for a native engine",
    ("strategy.implementation", "ours"): "use buffer, parameter or tensor",
    ("strategy.implementation", "flat"): "use buffer",
    ("optimizer", "adam"): "use optimizer=adamw (with optimizer.weight_decay=0 it is Adam)",
    ("optimizer", "momentum"): "use optimizer=sgd optimizer.momentum=0.9",
    ("precision", "fp16"): f"fp16 needs loss scaling, which is not here: {MIXED}",
    ("precision", "float16"): f"fp16 needs loss scaling, which is not here: {MIXED}",
    ("precision", "amp"): MIXED,
    ("precision", "mixed"): MIXED,
    ("precision", "bfloat16"): "use precision=bf16, or precision=bf16_master with fp32 weights",
    ("precision", "float32"): "use precision=fp32",
    ("cluster.device", "gpu"): "use cuda",
    ("cluster.device", "mps"): "use cpu: Apple's GPUs have no collectives",
    (
        "model",
        "llama",
    ): f"use model=tiny, small, smollm2_135m or llama_7b, all of which are LLaMAs, {OR_ANY}",
    ("model", "gpt2"): f"use model=gpt2_tiny, {OR_ANY}",
    ("model", "mixtral"): f"use model=mixtral_tiny, {OR_ANY}",
    **{
        ("data", word): f"use data=hf data.path=... with a {word} file or a folder of them"
        for word in ("csv", "tsv", "json", "jsonl", "parquet")
    },
    **{
        ("data", word): "use data=hf data.path=... with its id on the hub"
        for word in ("hub", "huggingface", "datasets", "imdb", "wikitext", "openwebtext", "c4")
    },
    ("data", "txt"): "use data=offline data.path=... with a .txt file",
    ("data", "text"): "use data=offline data.path=... with a .txt file",
    ("data", "yelpreviewfull"): "use data=yelp, or data=yelp_causal for a causal model",
}
# A key without its signs -> what to use
KEYS = {
    **dict.fromkeys(("lr", "learningrate"), "use optimizer.lr"),
    **dict.fromkeys(("batchsize", "batch", "globalbatchsize"), BATCH),
    **dict.fromkeys(
        ("gradientaccumulationsteps", "accumulation"), f"it follows from others: {BATCH}"
    ),
    **dict.fromkeys(("steps", "maxsteps", "numsteps", "iterations"), "use train.steps"),
    **dict.fromkeys(("epochs", "numepochs"), "runs are counted in steps: use train.steps"),
    **dict.fromkeys(("dataset", "datasetname"), "use data=hf data.path=..., or another data="),
    **dict.fromkeys(("file", "files", "datafiles", "trainfile"), "use data.path (with data=hf)"),
    **dict.fromkeys(("column", "textfield", "datasettextfield"), "use data.text_column"),
    **dict.fromkeys(("seqlen", "seqlength", "blocksize", "contextlength"), "use data.seq_len"),
    **dict.fromkeys(
        ("gpus", "ngpus", "nproc", "nprocpernode", "worldsize", "ranks"), "use world_size"
    ),
    **dict.fromkeys(("nodes", "nnodes"), "use world_size and cluster.slurm.ranks_per_node"),
    **dict.fromkeys(
        ("partition", "account", "qos", "constraint"), "use cluster.slurm.* of that name"
    ),
    **dict.fromkeys(("time", "timelimit"), "use cluster.timeout_s"),
    **dict.fromkeys(("seed",), "use train.seed"),
    **dict.fromkeys(("device",), "use cluster.device"),
    **dict.fromkeys(("dtype", "bf16", "fp16"), "use precision=bf16_master, or another precision"),
    **dict.fromkeys(("zerostage", "stage"), "use strategy=zero1, zero2 or zero3"),
    **dict.fromkeys(("zerooptimization",), "use strategy=zero1, zero2 or zero3"),
    **dict.fromkeys(("gradientcheckpointing",), "use train.activation_checkpointing"),
    **dict.fromkeys(("maxgradnorm", "gradclip", "clip"), "use optimizer.max_grad_norm"),
    **dict.fromkeys(("checkpoint", "saveevery", "savesteps"), "use checkpoint.every"),
    **dict.fromkeys(("outputdir", "output"), "use outputs"),
    **dict.fromkeys(("mlflow", "tracker"), "use tracking=mlflow or tracking=files"),
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
    return WORDS.get((key.removesuffix(".name"), plain)) or suggest_nearest(word, options)


def suggest_key(key: str, names: Iterable[str]) -> str:
    """Return what to use for a key that does not exist: ours for one of another project, else the nearest."""
    if remedy := KEYS.get(_plain(key.rpartition(".")[2])):
        return remedy
    return f"{did_you_mean(key, names, most=3)} `zeroexp --cfg job` shows them all".lstrip()


def _plain(word: str) -> str:
    return re.sub(r"[-_ .]", "", word).lower()
