"""Which tensor of another trainer's checkpoint is which of the configured model: all of them, or the first that is not.

A name that is missing or too many, a shape that differs and moments of another optimizer are refused: to load what
happens to fit would train on with half of the model drawn anew.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zeroexp.checkpoint.manifest import CheckpointError
from zeroexp.config.keys import Config
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.foreign.foreign_checkpoint import ForeignCheckpoint, Place
from zeroexp.interface.canonical import BUFFER, WEIGHT
from zeroexp.interface.module_buffers import persistent_buffers
from zeroexp.interface.optimizer_trial import moments_kept
from zeroexp.interface.saved_state import names_in
from zeroexp.models.module import BuiltModel
from zeroexp.training.learning_rate import learning_rate

STEP = "step"
# torchtitan's names of a llama, and those of transformers.
TORCHTITAN = {
    r"\btok_embeddings\.": "model.embed_tokens.",
    r"\blayers\.(\d+)\.attention\.(?:qkv_linear\.)?w([qkvo])\.": r"model.layers.\1.self_attn.\2_proj.",
    r"\blayers\.(\d+)\.feed_forward\.w1\.": r"model.layers.\1.mlp.gate_proj.",
    r"\blayers\.(\d+)\.feed_forward\.w2\.": r"model.layers.\1.mlp.down_proj.",
    r"\blayers\.(\d+)\.feed_forward\.w3\.": r"model.layers.\1.mlp.up_proj.",
    r"\blayers\.(\d+)\.attention_norm\.": r"model.layers.\1.input_layernorm.",
    r"\blayers\.(\d+)\.ffn_norm\.": r"model.layers.\1.post_attention_layernorm.",
    r"(^|\.)norm\.": r"\1model.norm.",
    r"(^|\.)output\.": r"\1lm_head.",
}
# Rotary positions turn neighbouring rows of these together there, in transformers rows half a head apart: of weights,
# biases, and gains of the norms before them.
TURNED = re.compile(r"\.[qk]_(proj|norm)\.(weight|bias)$")
# Keys of parameter groups that no other trainer has.
OURS = ("kind", "layout", "master", "over", "lr_scale")


def of_torchtitan(key: str) -> str:
    """Return the key with the parameter's name in transformers."""
    for theirs, ours in TORCHTITAN.items():
        key = re.sub(theirs, ours, key)
    return key


class Matched(NamedTuple):
    sources: dict[Place, Place]  # ours -> theirs
    tied: dict[Place, Place]  # theirs under another name -> ours, which it must equal
    notes: list[str]


def names_of(module: nn.Module) -> dict[str, list[str]]:
    """Return the names of each parameter, of which a tied one has several, and of each persistent buffer, by ours."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    ours = {name: names[parameter] for name, parameter in module.named_parameters()}
    return {**ours, **{name: [name] for name in persistent_buffers(module)}}


def match(found: ForeignCheckpoint, built: BuiltModel, config: Config) -> Matched:
    """Raises CheckpointError where the model or the optimizer is another."""
    names, buffers = names_of(built.module), persistent_buffers(built.module)
    sources, tied = _match_weights(found, built.module, names)
    moments = _match_moments(found, built, config, names)
    ours = {
        Place(name, BUFFER if name in buffers else WEIGHT): Place(theirs, WEIGHT)
        for name, theirs in sources.items()
    }
    notes = [*_dtype_notes(found, ours, "weights"), *_dtype_notes(found, moments, "moments")]
    trained = [name for name, p in built.module.named_parameters() if p.requires_grad]
    if without := [name for name in trained if not any(place.name == name for place in moments)]:
        notes.append(f"no moments of {_first(without)}: the optimizer begins anew there")
    theirs = {place.name for place in found.tensors if place.key != WEIGHT}
    frozen = [own for own in names if own not in trained and theirs.intersection(names[own])]
    if frozen:
        notes.append(f"left out, as frozen here: the moments of {_first(frozen)}")
    if found.left_out:
        notes.append(f"left out, as neither weights nor moments: {_first(found.left_out)}")
    return Matched({**ours, **moments}, tied, notes)


def _match_weights(
    found: ForeignCheckpoint, module: nn.Module, names: dict[str, list[str]]
) -> tuple[dict[str, str], dict[Place, Place]]:
    """Return their name of each weight and buffer, and their further names of tied ones."""
    there = {
        name: [each for each in all_names if Place(each, WEIGHT) in found.tensors]
        for name, all_names in names.items()
    }
    shapes = {**dict(module.named_parameters()), **persistent_buffers(module)}
    theirs = {name: found.tensors[Place(own[0], WEIGHT)] for name, own in there.items() if own}
    all_ours = {each for all_names in names.values() for each in all_names}
    too_many = [
        name for name in dict.fromkeys(p.name for p in found.tensors) if name not in all_ours
    ]
    differ = [name for name, tensor in theirs.items() if tensor.shape != shapes[name].shape]
    problems: list[str] = []
    if missing := [name for name in there if name not in theirs]:
        problems.append(f"{_first(missing)} of this model not in it")
    if too_many:
        problems.append(f"{_first(too_many)} of it not in this model")
    if differ:
        both = f"{list(theirs[differ[0]].shape)} in it and {list(shapes[differ[0]].shape)} here"
        problems.append(f"{_first(differ)} of another shape, {both}")
    if problems:
        problem = f"{found.folder}: of another model: {', '.join(problems)}"
        raise CheckpointError(f"{problem}; name the model that was trained, by model=...")
    tied = {
        Place(other, WEIGHT): Place(name, WEIGHT)
        for name, own in there.items()
        for other in own[1:]
    }
    return {name: own[0] for name, own in there.items()}, tied


def _match_moments(
    found: ForeignCheckpoint, built: BuiltModel, config: Config, names: dict[str, list[str]]
) -> dict[Place, Place]:
    shapes = {name: p.shape for name, p in built.module.named_parameters()}
    by_name: dict[str, list[Place]] = defaultdict(list)
    for place in found.tensors:
        by_name[place.name].append(place)
    matched: dict[Place, Place] = {}
    groups = parameter_groups(built.module, config.optimizer, built.blocks)
    kept = moments_kept(optimizer_factory(config.optimizer), groups)()
    of_group = zip(names_in(built.module, groups), kept, strict=False)  # none of what can not step
    for name, keeps in ((name, keeps) for own, keeps in of_group for name in own):
        places = [place for each in names[name] for place in by_name.get(each, ())]
        there = {place.key: place for place in reversed(places) if place.key != WEIGHT}
        if not there:
            continue
        if not keeps.of_each <= there.keys() | {STEP} <= keeps.of_any | {STEP}:
            ours, theirs = ", ".join(sorted(keeps.of_any)) or "nothing", ", ".join(sorted(there))
            problem = f"it keeps {ours}, and {found.folder} holds {theirs} of {name}"
            word = f"optimizer.name={config.optimizer.name}"
            raise CheckpointError(f"{word}: {problem}; name the optimizer that wrote it")
        for key, place in there.items():
            shape = found.tensors[place].shape
            if shape != (() if key == STEP else shapes[name]):
                problem = f"{key} of {name} is {list(shape)}, the parameter {list(shapes[name])}"
                raise CheckpointError(f"{found.folder}: {problem}; give another checkpoint")
            matched[Place(name, key)] = place
    return matched


def _dtype_notes(found: ForeignCheckpoint, matched: dict[Place, Place], what: str) -> list[str]:
    """Say what is narrower than the float32 that a run without `precision` computes in."""
    dtypes = {found.tensors[theirs].dtype for ours, theirs in matched.items() if ours.key != BUFFER}
    narrow = [str(each).removeprefix("torch.") for each in dtypes if each.itemsize < 4]
    return [f"its {what} are {', '.join(sorted(narrow))}, and taken as they are"] if narrow else []


def _first(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" * (len(names) > 1))


def param_groups(config: Config, step: int, built: BuiltModel) -> list[dict[str, Any]]:
    """Return the optimizer's groups as others save them: names for parameters, and the next step's learning rate."""
    highest = config.optimizer.lr
    lr = learning_rate(config.optimizer, step, config.train.warmup_steps + config.train.steps)
    groups = parameter_groups(built.module, config.optimizer, built.blocks)
    optimizer = optimizer_factory(config.optimizer)(
        [{**group, "params": [_small(p) for p in group["params"]]} for group in groups]
    )
    return [
        {
            **{key: value for key, value in group.items() if key not in OURS},
            "lr": lr * group.get("lr_scale", 1.0),
            "initial_lr": highest * group.get("lr_scale", 1.0),  # which torch's schedulers ask for
            "params": own,
        }
        for group, own in zip(optimizer.param_groups, names_in(built.module, groups), strict=True)
    ]


def _small(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.zeros([2] * parameter.ndim))
