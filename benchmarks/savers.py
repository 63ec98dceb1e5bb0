"""Three ways to a checkpoint: ours, torch.save of what rank 0 gathered, and torch.distributed.checkpoint of FSDP2.

Each is used as its documentation says, at its best settings, and is whole when its files are synced to the disk. Tied
weights are written once everywhere: torch's state dicts name them twice, so the second name is left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from zeroexp.checkpoint import folders
from zeroexp.checkpoint.load import load
from zeroexp.checkpoint.save import Saver
from zeroexp.config.keys import CheckpointConfig, Config
from zeroexp.engines.torch_fsdp2 import TorchFSDP2
from zeroexp.interface.strategy import Strategy
from zeroexp.process import world as worlds
from zeroexp.process.world import World

Finish = Callable[[], object]
OURS, TORCH_SAVE, DCP, DCP_ASYNC = "zeroexp", "torch.save", "DCP", "DCP async"


class Way(Protocol):
    def save(self) -> Finish:
        """Returns when training may change the state; what it returns waits until all is whole and synced."""
        ...

    def load(self) -> None:
        """What was saved last, into the engine."""
        ...


def way(name: str, strategy: Strategy, folder: Path, world: World) -> Way:
    if name == OURS:
        return Ours(strategy, folder, world)
    assert isinstance(strategy, TorchFSDP2), f"{name} saves FSDP2"
    if name == TORCH_SAVE:
        return Gathered(strategy, folder, world)
    return Distributed(strategy, folder, beside_training=name == DCP_ASYNC)


class Ours:
    def __init__(self, strategy: Strategy, folder: Path, world: World) -> None:
        self._strategy, self._folder, self._world = strategy, folder, world
        config = Config(checkpoint=CheckpointConfig(keep=1_000_000))  # who measures removes them
        self._saver = Saver(folder, strategy, config, world)
        self._step = 0

    def save(self) -> Finish:
        self._step += 1
        self._saver.async_save(self._step)
        return self._saver.finish

    def load(self) -> None:
        newest = folders.newest_checkpoint(self._folder)
        assert newest is not None
        load(newest, self._strategy, self._world)


class Gathered:
    """Everything on rank 0, then torch.save. Every rank maps the file and takes its own rows out of it."""

    def __init__(self, strategy: TorchFSDP2, folder: Path, world: World) -> None:
        self._strategy, self._file, self._world = strategy, folder / "state.pt", world

    def save(self) -> Finish:
        state = _state_dicts(
            self._strategy, StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if self._world.rank == 0:
            with self._file.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        worlds.barrier()
        return lambda: None

    def load(self) -> None:
        state = torch.load(self._file, mmap=True, weights_only=True)
        parameters = dict(self._strategy.model.named_parameters())
        for name, parameter in parameters.items():
            state["model"][name] = _rows_of(state["model"][name], parameter)
        for name, moments in state["optimizer"]["state"].items():
            for key, moment in moments.items():
                moments[key] = _rows_of(moment, parameters[name])
        _set_state_dicts(self._strategy, state)


class Distributed:
    """FSDP2's shards through DCP's own planner and files, in line or beside training."""

    def __init__(self, strategy: TorchFSDP2, folder: Path, *, beside_training: bool) -> None:
        self._strategy, self._folder, self._beside_training = strategy, folder, beside_training
        self._group = worlds.background_group(600.0) if beside_training else None

    def save(self) -> Finish:
        state = _state_dicts(self._strategy, StateDictOptions())
        if not self._beside_training:
            dcp.save(state, checkpoint_id=self._folder)
            return lambda: None
        # It stages too, where the counter of memory sees it; without one, DCP copies past torch's allocator.
        writer = dcp.FileSystemWriter(self._folder)
        writing: Any = dcp.async_save(state, storage_writer=writer, process_group=self._group)
        return writing.result

    def load(self) -> None:
        state = _state_dicts(self._strategy, StateDictOptions())
        dcp.load(state, checkpoint_id=self._folder)
        _set_state_dicts(self._strategy, state)


def _state_dicts(strategy: TorchFSDP2, options: StateDictOptions) -> dict[str, Any]:
    names = dict(strategy.model.named_parameters())
    model = get_model_state_dict(strategy.model, options=options)
    optimizer = get_optimizer_state_dict(strategy.model, strategy.optimizer, options=options)
    return {"model": {n: t for n, t in model.items() if n in names}, "optimizer": optimizer}


def _set_state_dicts(strategy: TorchFSDP2, state: dict[str, Any]) -> None:
    options = StateDictOptions(strict=False)  # the second names of tied weights are not there
    set_model_state_dict(strategy.model, state["model"], options=options)
    set_optimizer_state_dict(
        strategy.model, strategy.optimizer, state["optimizer"], options=options
    )


def _rows_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Cut as the parameter is, without a message: every rank has mapped the whole."""
    if tensor.shape != parameter.shape:
        return tensor
    like = cast(DTensor, parameter)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
