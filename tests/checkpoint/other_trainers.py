"""Trainers as somebody else would write them, with torch's own FSDP2 and optimizer, and none of zeroexp's engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.models_for_tests import MODELS, microbatch_of, num_valid
from tests.oracle import Recipe
from zeroexp.models.loss import loss_sum
from zeroexp.process.world import World

RECIPE = Recipe(model="llama", accumulation=1, steps=6)
SAVED = 3  # steps done
FORMS = ("nested", "flat", "titan")  # of what is saved
State = dict[str, dict[str, Tensor]]


def adamw(model: nn.Module, lr: float = 0.02) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=False)


def share_of_loss(model: nn.Module, step: int, rank: int, size: int) -> Tensor:
    """This rank's summand of the global mean."""
    tokens, labels = microbatch_of(step, 0, rank)
    return loss_sum(model(input_ids=tokens), labels, "causal") / num_valid(step, 1, size)


def train_fsdp2(world: World, folder: Path, form: str | None = None) -> list[State]:
    """The whole state behind SAVED steps, where each of FORMS is saved into `folder`, and at the end.

    form: of what lies in `folder`, to go on from it; then the state at the end alone.
    """
    built = MODELS[RECIPE.model].build()
    model: Any = built.module
    mesh = init_device_mesh("cpu", (world.size,))
    for name in built.blocks:
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model) if form is None else adamw(model, lr=123.0)  # the saved one counts
    if form is not None:
        _load(model, optimizer, folder, form)
    states: list[State] = []
    for step in range(0 if form is None else SAVED, RECIPE.steps):
        # FSDP2 takes the mean of gradients; twice the mean of two is their sum, exactly.
        (share_of_loss(model, step, world.rank, world.size) * world.size).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in (SAVED, RECIPE.steps):
            states.append(_whole(model, optimizer))
        for each in FORMS if step + 1 == SAVED else ():
            dcp.save(_state_dict(model, optimizer, each), checkpoint_id=folder / each)
    return states


def _state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, form: str) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=form != "nested")
    weights = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    if form == "titan":  # weights without a prefix, beside what else torchtitan saves
        beside = {"train_state": {"step": torch.tensor(SAVED)}, "lr_scheduler": {"last_epoch": 3}}
        return {**weights, "optimizer": moments, **beside}
    return {"model": weights, "optimizer": moments}


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, form: str) -> None:
    state = _state_dict(model, optimizer, form)
    dcp.load(state, checkpoint_id=folder)
    options = StateDictOptions(flatten_optimizer_state_dict=form != "nested")
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return {
        name: {
            key: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
            for key, each in {"weight": parameter, **optimizer.state[parameter]}.items()
        }
        for name, parameter in model.named_parameters()
    }


def save_alone(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer] | None,
    prefix: str = "",
) -> None:
    """What one process saves without ranks."""
    state: dict[str, Any] = {f"{prefix}model": get_model_state_dict(model)}
    if optimizer is not None:
        state[f"{prefix}optimizer"] = get_optimizer_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=folder, no_dist=True)
