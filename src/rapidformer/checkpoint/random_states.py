"""The random states of one rank as JSON: nothing is ever unpickled."""

from __future__ import annotations

import base64
import hashlib
import random
from typing import Any

import numpy as np
import torch


def get_random_states(device: torch.device) -> dict[str, Any]:
    """Python's, NumPy's, torch's and the device's generators."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, words, position, has_gauss, gauss = numpy_state
    version, python_words, gauss_next = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(python_words), gauss_next],
        "numpy": [kind, words.tolist(), int(position), int(has_gauss), float(gauss)],
        "torch": _encode(torch.get_rng_state()),
    }
    if device.type == "cuda":
        states["cuda"] = _encode(torch.cuda.get_rng_state(device))
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Continue with the random numbers of the saved moment."""
    random.setstate(_to_python_state(states["python"]))
    np.random.set_state(_to_numpy_state(states["numpy"]))
    torch.set_rng_state(_decode(states["torch"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_decode(states["cuda"]), device)


def draw_other_numbers(states: dict[str, Any], replica: int) -> None:
    """Numbers for another layout, from the states that rank 0 saved.

    Replicas must draw different masks, ranks that share a layer the same ones, as at the start of a
    run. The states of the old layout's ranks would mix that up.
    """
    random.setstate(_to_python_state(states["python"]))
    np.random.set_state(_to_numpy_state(states["numpy"]))
    digest = hashlib.sha256(states["torch"].encode("ascii")).digest()
    torch.manual_seed(int.from_bytes(digest[:4], "big") + replica)


def _to_python_state(state: list[Any]) -> Any:
    version, words, gauss_next = state
    return version, tuple(words), gauss_next


def _to_numpy_state(state: list[Any]) -> Any:
    kind, words, position, has_gauss, gauss = state
    return kind, np.array(words, dtype=np.uint32), position, has_gauss, gauss


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
