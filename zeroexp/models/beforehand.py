"""What is wrong with a model, told before a rank starts: it is built without memory, its weights' headers are read.

Ranks look at weights too: those of Slurm may be the only ones that see the folder.
"""

from __future__ import annotations

from pathlib import Path

from zeroexp import hub
from zeroexp.config import Config, ConfigError, ModelConfig
from zeroexp.models.build import build_model

# What a library raises at a number it can not build with; its own words are told behind our key.
RAISED = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError)
RAISED = (*RAISED, TypeError, ValueError)

_fine: list[tuple[ModelConfig, int | None]] = []  # a sweep has many points and few models


def check_model(config: Config) -> None:
    """Raises ConfigError for a model that can not be built, or weights that are here and are not the model's.

    For ranks of this machine weights are fetched here, once, if the hub has to be asked.
    """
    model, words = config.model, config.data.vocab_size
    if (model, words) in _fine:
        return
    _build(model, words)
    _look_at_weights(model, config.cluster.kind)
    _fine.append((model, words))


def _build(model: ModelConfig, words: int | None) -> None:
    key = "model." + (model.family if model.family in ("mlp", "moe") else "hf_config")
    named = f"{key} of model.name={model.name}"
    try:
        blocks = build_model(model, seed=0, device="meta", vocab_size=words).blocks
    except ConfigError:
        raise
    except RAISED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{named}: no model can be built of it ({reason}); change it") from error
    if not blocks:
        raise ConfigError(f"{named}: the model has no block; use one layer or more")


def _look_at_weights(model: ModelConfig, cluster: str) -> None:
    if model.weights is None:
        return
    folder = Path(model.weights).expanduser()
    if not folder.is_dir():
        if cluster != "local":
            return
        folder = hub.model_folder(model.weights)
    # Here and not above: transformers takes two seconds to import, and the families of our own need none of it.
    from zeroexp.models import huggingface

    huggingface.require_fitting_weights(model, folder)
