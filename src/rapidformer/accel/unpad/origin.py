"""Which mask rows were read from: a model's own code may give the model inside it another one.

Two texts in one call, a mask that hides words at random or one segment: such masks have the shape
of the batch's, and other rows. Where one of them is used, batches keep their padding.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rapidformer.accel.unpad.kernels import get_current_rows, use_rows
from rapidformer.accel.unpad.rows import Mask, Rows
from rapidformer.compat.torch_tensors import count_changes, locate
from rapidformer.data.batch import get_host_copy
from rapidformer.models.plan import find_outermost
from rapidformer.overlay import extend

_NAME = "attention_mask"


@dataclass(frozen=True)
class MaskOrigin:
    """The mask that rows were read from."""

    mask: Tensor
    version: int
    is_real: Mask | None
    """What it said; None if tensors are overwritten in place, so that the host does not know."""

    def allows(self, mask: Any) -> bool:
        """Whether another mask says the same; waits for the device if it is another tensor."""
        if not isinstance(mask, Tensor) or mask.shape != self.mask.shape:
            return False
        if locate(mask) == locate(self.mask) and count_changes(mask) == self.version:
            return True
        is_recorded = mask.is_cuda and torch.cuda.is_current_stream_capturing()
        if self.is_real is None or is_recorded:
            return False
        return np.array_equal(get_host_copy(mask).bool().numpy(), self.is_real)


def note_origin(rows: Rows, mask: Tensor, is_real: Mask | None) -> None:
    """Use these rows only where a mask says the same as this one."""
    vars(rows).update(origin=MaskOrigin(mask, count_changes(mask), is_real))


def extend_inner_models(model: nn.Module) -> list[nn.Module]:
    """Let transformers' models inside a model use the batch's rows with its mask only."""
    inner = [found for found in find_outermost(model) if found is not model]
    for found in inner:
        extend(found, "unpad", _build_inner)
    return inner


def _build_inner(cls: Any) -> dict[str, Any]:
    names = list(inspect.signature(inspect.unwrap(cls.forward)).parameters)[1:]

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        rows = get_current_rows()
        origin = None if rows is None else rows.origin
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if origin is None or origin.allows(given.get(_NAME)):
            return cls.forward(self, *args, **kwargs)
        with use_rows(None):
            return cls.forward(self, *args, **kwargs)

    return {"forward": forward}
