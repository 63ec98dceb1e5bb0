"""Words for every key of the config, for its groups, for Hydra's flags and for its grammar; and lines of them."""

from __future__ import annotations

import random

from tests.composing import options
from zeroexp.config.keys import KEYS
from zeroexp.config.plugins import REGISTRIES

LONG = "x" * 300
INTS = "-1 0 1 2 3 1000 1000000000 4294967295 4294967296 1000000000000 1e20 99999999999999999999 1.5 nan inf"
FLOATS = "-1 -0.0 0 1e-300 1e-8 0.5 1 2 1e9 1e300 nan inf -inf"
# Of Hydra and OmegaConf, for every key.
FOR_ALL = ("null", "", "abc", "[1]", "{a: 1}", "???", "${nope}", "'")
PORTS = ("60001-63000", "1-65535", "0-1", "2-1", "1-65536", "60001-", "-60001", "a-b", "1-2-3")
TEXTS = (*("3", "a/b", "../x", "..", "ümläut", "a b", "~x", "$HOME", "a=b", "-x"), LONG)
LISTS = ("[]", "[1,2]", "[0]", "[-1]", "[a]", "[[1]]", "[0.9,0.99]", "[nan,0.9]", "[1,null]", "3")
DICTS = ("{}", "{mem: 3}", "{a: {b: 1}}", "{1: 2}", "3")
SWEEPS = ("range(1,3)", "range(5,5)", "choice(1,2)", "choice()", "glob(*)", "interval(0,1)", "1,1")
# Models of these groups are a second's work, and the others none for a laptop.
GROUPS = ("model", "data", "strategy", "cluster", "precision", "optimizer", "tracking", "study")

SHAPE = {
    "model.hf_config": (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
        *("hidden_act", "head_dim", "tie_word_embeddings", "attention_bias", "attention_dropout"),
        *("initializer_range", "rope_parameters", "use_cache", "pretraining_tp", "pad_token_id"),
        *("bos_token_id", "layers", "_name_or_path", "quantization_config"),
    ),
    "model.published": ("hidden_size",),
    "model.mlp": ("width", "depth"),
    "model.moe": ("top_k", "num_experts", "experts"),
    "cluster.slurm.sbatch": ("reservation", "time"),
}
SHAPE_VALUES = (
    *["-1", "0", "1", "2", "3", "64", "100", "1e12", "0.1", "nan", "gelu", "null"],
    "{a: 1}",
)
SWEPT = ("train.steps", "world_size", "optimizer.lr", "strategy", "cluster.slurm.setup", "study")

LOOSE = (
    *("=", "=3", "train", "train.steps", "a=", "+a=1", "++a.b=1", "~train.steps", "~train", "~a"),
    *(
        "++train.steps=2",
        "+train.steps=2",
        "train.steps@x=3",
        "strategy@x=zero1",
        "+strategy@a=ddp",
    ),
    *("model@model=tiny", "train.steps=1,2", "train.steps=1,", "train.steps=,1", "train.steps==3"),
    *("world_size=all", "world_size=all,1", "train.steps=${train.warmup_steps}", "train..steps=1"),
    *("train.steps=${train.steps}", "outputs=${outputs}", ".train=1", "train.=1", "train/steps=1"),
    *("-m", "--multirun", "-m train.steps=1,2", "--resolve", "--package x", "-p x", "-x", "--nope"),
    *("--cfg", "--cfg job", "--cfg all", "--cfg hydra", "--cfg nope", "--cfg job --resolve"),
    *(
        "--info",
        "--info config",
        "--info nope",
        "--help",
        "--hydra-help",
        "--version",
        "-h",
        "-c job",
    ),
    *("--rerun", "--rerun nope", "--rerun .", "--run", "--shell-completion", "-sc install=bash"),
    *("--experimental-rerun x", "--config-name nope", "--config-name config", "--config-path nope"),
    *("--config-dir nope", "--config-dir .", "-cn nope", "-cd nope", "hydra.mode=RUN", "hydra=x"),
    *("hydra/launcher=basic", "hydra/launcher=nope", "hydra/sweeper=basic", "hydra/sweeper=nope"),
    *("hydra.sweeper.max_batch_size=0", "hydra.sweeper.max_batch_size=1", "hydra.run.dir=x"),
    *(
        "hydra.sweeper.params=null",
        "hydra.sweeper.params=3",
        "hydra.sweeper=null",
        "hydra.verbose=true",
    ),
    *(
        "hydra.sweeper.nope=3",
        "hydra.searchpath=[nope]",
        "hydra.verbose=nope",
        "hydra.job.chdir=true",
    ),
    *("hydra.sweep.dir=x", "hydra.output_subdir=x", "hydra.help.template=x", "\x00", "\n", "ü=3"),
    *(
        "study.include=[{strategy: [zero3]}]",
        "study.include=[{nope: [1]}]",
        "study.include=[{strategy: 3}]",
    ),
)


def values(key: str, kind: str) -> list[str]:
    """Return words for a key of this type."""
    registered = [word for registry in REGISTRIES.get(key, ()) for word in registry]
    found = [*KEYS[key].metadata.get("choices", ()), *registered]
    if "int" in kind or kind == "Any":
        found += INTS.split()
    if "float" in kind or kind == "Any":
        found += FLOATS.split()
    if "bool" in kind:
        found += ["true", "false", "1", "0", "yes", "maybe"]
    if "str" in kind and not kind.startswith(("list", "dict")):
        found += TEXTS
    if kind.startswith("list"):
        found += LISTS
    if key == "cluster.slurm.ports":
        found += PORTS
    if kind.startswith("dict"):
        found += DICTS
    return list(dict.fromkeys([*found, *FOR_ALL]))


def single() -> list[str]:
    """Every word of this file, each once."""
    found = [
        f"{key}={value}" for key, item in KEYS.items() for value in values(key, str(item.type))
    ]
    for group in GROUPS:
        words = [
            *options(group),
            "",
            *["null", "nope", "[a,b]", "3", "../x", "a/b", "tiny,tiny", "glob(zz*)"],
        ]
        found += [f"{group}={word}" for word in words]
    for parent, names in SHAPE.items():
        found += [f"++{parent}.{name}={v}" for name in names for v in SHAPE_VALUES]
    found += [f"{key}={sweep}" for key in SWEPT for sweep in SWEEPS]
    return list(dict.fromkeys([*found, *LOOSE]))


def lines(count: int, seed: int) -> list[list[str]]:
    """`count` lines: as many single words as half of it, then pairs of them; a flag with its value is one word."""
    dice, words = random.Random(seed), single()
    ones = dice.sample(words, min(len(words), (count + 1) // 2))
    pairs = [dice.sample(words, 2) for _ in range(count - len(ones))]
    return [[word] for word in ones] + pairs
