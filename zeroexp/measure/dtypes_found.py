"""The dtypes of a run, read off its tensors in the step whose memory is read, beside those that were asked for.

    weights     of modules with a matrix, while they run        gradients   where they rest after backward
    products    what these modules return                       reduced     what the optimizer is given
    norm        of all gradients, as the engine returns it      master      what it updates
    at rest     codes, where parameters rest as such            moments     what it keeps of each element

No engine is asked what it does: modules, optimizers and tensors are looked at. A precision that an engine accepts and
does not have shows here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from zeroexp.config.keys import Config
from zeroexp.config.optimizer import optimizers_of
from zeroexp.cut.moment_blocks import INT8
from zeroexp.interface.strategy import ModelStates
from zeroexp.process import world as worlds


class DtypeRecorder:
    """The dtypes of one step by role, each in the order in which they were met."""

    def __init__(self) -> None:
        self.by_role: dict[str, dict[str, None]] = {}
        self._depth = 0  # an optimizer may call another, as ZeroRedundancyOptimizer does

    def note(self, role: str, *tensors: Any) -> None:
        """Note the dtypes of those that hold floating-point numbers, whatever else is among them."""
        found = self.by_role.setdefault(role, {})
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                found[str(tensor.dtype).removeprefix("torch.")] = None

    def note_states(self, states: ModelStates) -> None:
        """Note gradients that rest, and what the optimizer keeps of each element (a count has one)."""
        if any(each.dtype is torch.uint8 for each in states.parameters):
            self.by_role["at rest"] = {"codes": None}
        self.note("gradients", *states.gradients)
        kept = [each for each in states.optimizer if each.numel() > 1]
        self.note("moments", *kept)
        if any(each.dtype is torch.int8 for each in kept):
            self.by_role["moments"][INT8] = None

    @contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Generator[None]:
        """Look at these modules, and at every optimizer, that run inside."""
        with ExitStack() as stack:
            for each in modules:
                if _has_matrix(each):
                    # Before FSDP2's own, which puts the shards back.
                    stack.enter_context(each.register_forward_hook(self._ran, prepend=True))
            stack.enter_context(register_optimizer_step_pre_hook(self._steps))
            stack.enter_context(register_optimizer_step_post_hook(self._stepped))
            yield

    def gather(self) -> None:
        """Add what the other ranks met, as each may own some of the parameters alone. All ranks call it together."""
        for of_rank in worlds.gather_objects(self.by_role):
            for role, dtypes in of_rank.items():
                self.by_role.setdefault(role, {}).update(dtypes)

    def as_record(self, asked: Mapping[str, str]) -> dict[str, str]:
        """Return what engine.json keeps: all dtypes, and those that are not as asked, if there are some."""
        found = {role: "+".join(dtypes) for role, dtypes in self.by_role.items() if dtypes}
        if INT8 in self.by_role.get("moments", {}):
            found["moments"] = INT8  # without the full ones that small parameters have beside
        others = [
            f"{role} {found[role]} for {asked[role]}"
            for role in found
            if {*found[role].split("+")} != {*asked[role].split("+")}
        ]
        if not found:
            return {}
        record = {"dtypes": ", ".join(f"{role} {dtype}" for role, dtype in found.items())}
        return {**record, "dtypes_not_as_asked": ", ".join(others)} if others else record

    def _ran(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        self.note("weights", *module.parameters(recurse=False))
        self.note("products", *tree_leaves(output))

    def _steps(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        # Our engine shows these gradients to no other hook.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            updated = [p for group in optimizer.param_groups for p in group["params"]]
            updated = [p for p in updated if p.grad is not None]
            self.note("reduced", *(p.grad for p in updated))
            self.note("master", *updated)

    def _stepped(self, *_: Any) -> None:
        self._depth -= 1


def _has_matrix(module: nn.Module) -> bool:
    """Tell whether a module multiplies by a matrix of its own; an embedding looks rows up."""
    own = module.parameters(recurse=False)
    return not isinstance(module, nn.Embedding) and any(p.ndim > 1 for p in own)


def dtypes_asked(config: Config, groups: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return by role the dtypes that a config asks for, where `groups` (`parameter_groups`) are what it trains."""
    precision, settings = config.precision, optimizers_of(config.optimizer)
    of_groups = [(group.get("kind", ""), group.get("master", precision.master)) for group in groups]
    masters = "+".join({master: None for _, master in of_groups})
    moments = {settings[kind].moments or master: None for kind, master in of_groups}
    return {
        "at rest": "codes" if config.strategy.codes else precision.compute,
        "weights": precision.compute,
        "products": "bfloat16" if precision.autocast else precision.compute,
        "gradients": precision.reduce,
        "reduced": masters,
        "master": masters,
        "moments": INT8 if INT8 in moments else "+".join(moments),
        "norm": "float32",
    }
