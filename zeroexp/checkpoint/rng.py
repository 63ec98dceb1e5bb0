"""Convert the random states of this process to one-dimensional tensors of bytes, and back, without pickle.

torch's states are bytes already; those of Python and numpy are numbers, written as JSON.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zeroexp.process.world import World


def random_states(world: World) -> dict[str, Tensor]:
    """Return the states as uint8 on the CPU: "torch", "python", "numpy", and "cuda" if the device is a GPU."""
    _, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "python": _to_bytes(random.getstate()),
        "numpy": _to_bytes([np.asarray(keys).tolist(), *rest]),
    }
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    return states


def restore(states: Mapping[str, Tensor], world: World) -> None:
    """Restore the states; without a saved state for this kind of device, the device's state does not change."""
    torch.set_rng_state(states["torch"].clone())
    version, numbers, gauss = _from_bytes(states["python"])
    random.setstate((version, tuple(numbers), gauss))
    keys, *rest = _from_bytes(states["numpy"])
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), *rest))
    if "cuda" in states and world.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].clone(), world.device)


def _to_bytes(state: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _from_bytes(state: Tensor) -> Any:
    return json.loads(bytes(state.tolist()))
