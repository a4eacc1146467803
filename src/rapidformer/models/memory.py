"""Refuse a model whose weights do not fit into host memory, before it is built.

Linux grants more memory than there is, and kills the process that uses it: without this check, a
run would spend minutes on initial weights and then end without a message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rapidformer.errors import ModelError
from rapidformer.host_memory import measure_free_memory
from rapidformer.models.configuration import get_size

if TYPE_CHECKING:
    from torch import nn

_BYTES = 4  # of a weight: models are built in fp32
_GIB = 2**30


def check_fits(config: Any, build: Callable[[], nn.Module]) -> None:
    """Raise an error if this process cannot hold the weights of the model that ``build`` builds."""
    layers, width = get_size(config, "num_layers"), get_size(config, "hidden_size")
    if not isinstance(layers, int) or not isinstance(width, int):
        return
    free = measure_free_memory()
    # A block has about 12 x width^2 weights. Only a model that may be too large is counted exactly.
    if 12 * layers * width**2 * _BYTES < free:
        return
    import torch

    try:
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in build().parameters())
    except Exception:  # not every model can be built without values
        return
    if count * _BYTES > free:
        raise ModelError(
            f"The model is too large for this machine: the weights of {count / 1e9:,.1f} G "
            f"parameters take {count * _BYTES / _GIB:,.0f} GiB, and {free / _GIB:,.0f} GiB of "
            "memory are free. Choose a smaller model, or split it over the ranks of several "
            "machines (--zero-3-memory-optimization, --tensor-model-parallel-size)."
        )
