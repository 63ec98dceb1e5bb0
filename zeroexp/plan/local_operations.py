"""The base of the dispatch modes under which a rehearsal runs: each sees every operation on the tensors of one rank."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class LocalOperations(TorchDispatchMode):
    """Calls `run` for each operation; a subclass watches it, changes it or adds memory to it."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes back with the local tensors
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation, or what is to be run instead, and return its result."""
        return func(*args, **kwargs)
