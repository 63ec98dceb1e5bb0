"""The registry of model families: what `model.family` may name, and what each family reads of the config. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from zeroexp.config.keys import ConfigError, ModelConfig
from zeroexp.registry import Later, Registry
from zeroexp.registry.did_you_mean import suggest_nearest

if TYPE_CHECKING:
    from torch import nn

Shape = TypeVar("Shape")
OF_ANY_ROPE = ("rope_theta", "partial_rotary_factor")  # keys of any method of rotary positions


@dataclass(frozen=True)
class ModelFamily:
    """One family of models.

    build: takes the ModelConfig and the vocabulary size (None: vectors, or the data decides) and returns the module,
        with weights drawn from torch's default generator. Its forward takes `input_ids` or `vectors` and returns what
        models/loss.py takes.
    settings: its own keys below `model.settings`, with their defaults.
    blocks: the dotted name of the list whose modules are gathered one by one; None: found as models/blocks.py says.
    depth: the key of `shape` that holds the number of blocks, by which a plan saves time; None: it is not known.
    attention: returns layers x heads x size of a head, for the number of operations; None: there is no attention.
    skips_modules: a forward may leave out modules, so that their parameters get no gradient.
    """

    build: Callable[[ModelConfig, int | None], nn.Module]
    tasks: tuple[str, ...] = ("causal",)
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    blocks: str | None = None
    depth: str | None = None
    attention: Callable[[ModelConfig], int] | None = None
    skips_modules: bool = False
    shape: str = "settings"  # the dict of ModelConfig that it reads
    of_transformers: bool = False  # its weights may be read from files


def _of_transformers(depth: str | None) -> ModelFamily:
    return ModelFamily(
        build=Later("zeroexp.models.huggingface:build"),
        tasks=("causal", "classification"),
        depth=depth,
        shape="hf_config",
        of_transformers=True,
    )


MODELS = Registry(
    "model.family",
    {
        "llama": _of_transformers("num_hidden_layers"),
        "gpt2": _of_transformers("n_layer"),
        "mixtral": _of_transformers("num_hidden_layers"),
        "hf": _of_transformers(None),
        "mlp": ModelFamily(
            build=Later("zeroexp.models.mlp:build"),
            tasks=("regression",),
            blocks="blocks",
            depth="depth",
            shape="mlp",
        ),
        "moe": ModelFamily(
            build=Later("zeroexp.models.moe:build"),
            blocks="blocks",
            depth="depth",
            attention=lambda model: model.moe["depth"] * model.moe["width"],
            skips_modules=True,
            shape="moe",
        ),
    },
    needs="a ModelFamily(build=function)",
    fits=lambda value: isinstance(value, ModelFamily),
    arguments=lambda family: {"build": 2, "attention": 1},
)


def shape_of(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of the model's shape: the published ones, and over them what the run sets."""
    return _laid_over(model.published, getattr(model, MODELS[model.family].shape))


def _laid_over(published: Any, given: Any) -> Any:
    """Return `given`; where both are dicts, with what is published alone.

    Another method of rotary positions leaves behind the settings of the published one, in either spelling of its key.
    """
    if not isinstance(published, dict) or not isinstance(given, dict):
        return given
    there, of_given = (each.get("rope_type", each.get("type")) for each in (published, given))
    if of_given not in (None, there):
        published = {key: published[key] for key in OF_ANY_ROPE if key in published}
    return {**published, **{key: _laid_over(published.get(key), given[key]) for key in given}}


def whole_numbers(shape: type[Shape], given: dict[str, Any], key: str) -> Shape:
    """Make the dataclass `shape` of whole numbers from the keys below `key`. Raises ConfigError."""
    names = [field.name for field in fields(shape)]  # pyright: ignore[reportArgumentType]
    for word in given:
        if word not in names:
            raise ConfigError(f"{key}.{word}: no such key; {suggest_nearest(word, names)}")
    for word in names:
        if word not in given:
            raise ConfigError(f"{key}.{word} is missing: set it, for example {key}.{word}=64")
        if type(given[word]) is not int or given[word] < 1:
            raise ConfigError(f"{key}.{word}={given[word]}: no whole number above 0; use one")
    return shape(**given)


def vocab_size_of_shape(model: ModelConfig) -> int | None:
    """Return the vocabulary size in the model's shape; None for vectors, or where the data decides."""
    return shape_of(model).get("vocab_size")
