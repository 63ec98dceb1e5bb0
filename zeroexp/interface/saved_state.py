"""The canonical state of an engine's parameters, moments, buffers and Python values, and its loading.

Each rank may be given another state, as its own pieces. So the ranks compare what they found before anything changes:
where one of them can not load, all of them raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zeroexp.interface.canonical import WEIGHT, moments_of
from zeroexp.interface.check_state import (
    Kept,
    has_moments,
    require_buffers,
    require_moments,
    require_moments_kept,
    require_names,
    require_pieces_cover,
    require_state,
)
from zeroexp.interface.held_pieces import HeldPiece, contributed_piece
from zeroexp.interface.module_buffers import Buffers
from zeroexp.interface.python_values import PythonValues, own_values
from zeroexp.interface.quantized_moments import at_rest
from zeroexp.interface.reshard import (
    SavedMoments,
    empty_moment,
    fill_from_canonical,
    moments_dtype_of,
)
from zeroexp.interface.strategy import CanonicalState, CanonicalTensor
from zeroexp.process import world as worlds
from zeroexp.process.world import World


def names_in(module: nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the names of the module's parameters in each group of an optimizer."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [[names[p] for p in group["params"] if p in names] for group in groups]


class SavedState:
    """What one engine saves and loads."""

    def __init__(
        self,
        module: nn.Module,
        world: World,
        optimizer: Optimizer,
        names: Sequence[Sequence[str]],
        kept: Callable[[], Sequence[Kept]] = tuple,
        python: PythonValues | None = None,
    ):
        """optimizer: that keeps the moments. names: see PythonValues; `python` is that of other optimizers.

        kept: see optimizer_trial.moments_kept; asked when a state is loaded. By default no moment is required.
        """
        self.buffers = Buffers(module, world)
        self._names = [name for name, _ in module.named_parameters()]
        self._optimizer, self._python = optimizer, python or PythonValues(optimizer, names)
        self._names_in_groups, self._kept = names, kept
        self._has_moments = False  # from steps or from a state: one made before is worth nothing
        optimizer.register_step_post_hook(lambda *_: self._note_step())

    def of(
        self,
        held: Sequence[HeldPiece],
        *,
        prefix: str = "",
        beside: Mapping[str, Mapping[Tensor, Tensor]] | None = None,
    ) -> CanonicalState:
        """Return what this rank gives of a state: views of live memory, so copy those kept past the next step.

        prefix: what names of moments begin with. beside: further tensors by name, each laid out like the held one.
        """
        state = self.buffers.canonical()
        for each in held:
            entry = state.setdefault(each.name, {})
            if each.start == 0:
                values = self._python.of(each.name, each.tensor)
                entry.update(values if each.gives_values else {})
            kept = [
                (key, of[each.tensor]) for key, of in (beside or {}).items() if each.tensor in of
            ]
            of_moments = moments_of(self._optimizer.state.get(each.tensor, {}))
            given = [(key, tensor, each.share) for key, tensor in [(WEIGHT, each.tensor), *kept]]
            share = each.share_of_moments or each.share
            given += [(prefix + key, moment, share) for key, moment in of_moments.items()]
            for key, tensor, share in given:
                shape, piece = contributed_piece(tensor, each, share)
                canonical = entry.setdefault(key, CanonicalTensor(shape, tensor.dtype, []))
                canonical.pieces.extend([piece] if piece.tensor.numel() else [])
        return state

    def load(
        self,
        state: CanonicalState,
        held: Sequence[HeldPiece],
        *,
        same_everywhere: Callable[[object], bool] = worlds.same_everywhere,
        before_writes: Callable[[], None] = lambda: None,
        keeping: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Fill what is held, and buffers. Raises ValueError on all ranks, before anything changes, where one can not.

        same_everywhere: whether all ranks hold the same; all ranks call it. before_writes: runs when all ranks
        can load. keeping: what is made inside for a held tensor lies where that does.
        """
        problem = self._problem_of(state, held, same_everywhere)
        if not same_everywhere(problem is None) or problem is not None:
            problem = next(filter(None, worlds.gather_objects(problem)))  # the same on all ranks
            raise ValueError(f"strategy.load_state_dict: {problem}")
        before_writes()
        self.buffers.load(state)
        self._python.load(state)
        saved = SavedMoments(state)
        self._has_moments = has_moments(state)
        for each in held:
            with keeping(each.tensor):
                weight = state[each.name][WEIGHT]
                fill_from_canonical(each.flat, weight, start=each.start, name=each.name)
                if each.has_moments and self._has_moments:
                    self._load_moments(each, state[each.name], saved)

    def _note_step(self) -> None:
        self._has_moments = True

    def _problem_of(
        self,
        state: CanonicalState,
        held: Sequence[HeldPiece],
        same_everywhere: Callable[[object], bool],
    ) -> str | None:
        keeps = self._has_moments and any(map(moments_of, self._optimizer.state.values()))
        # A rank may own nothing: then others tell.
        are_needed = not same_everywhere(keeps) or keeps
        try:
            require_state(state)
            require_names(state, WEIGHT, self._names)
            if are_needed:
                require_moments(state)
            require_moments_kept(state, self._names_in_groups, self._kept())
            require_pieces_cover(state, held)
            self._python.require(state)
            require_buffers(state, self.buffers)
        except ValueError as error:
            return str(error)
        return None

    def _load_moments(
        self, held: HeldPiece, entry: dict[str, CanonicalTensor], saved_moments: SavedMoments
    ) -> None:
        own = self._optimizer.state[held.tensor]
        own.clear()
        own.update(own_values(entry, held.name))
        for key, saved in saved_moments.of(held.name):
            moment = own[key] = empty_moment(saved, held.tensor, self._optimizer, key)
            flat = held.local(moment).view(-1)
            saved.fill(flat, start=held.start, name=f"{held.name}.{key}")
            if saved.of_elements:
                own[key] = at_rest(moment, moments_dtype_of(self._optimizer, held.tensor, saved))
