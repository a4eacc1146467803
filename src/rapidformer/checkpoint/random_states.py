"""The random states of one rank as JSON: nothing is ever unpickled."""

from __future__ import annotations

import base64
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
    version, python_words, gauss_next = states["python"]
    random.setstate((version, tuple(python_words), gauss_next))
    kind, words, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, np.array(words, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_decode(states["torch"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_decode(states["cuda"]), device)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
