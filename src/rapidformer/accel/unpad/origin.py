"""Which mask rows were read from: a model's own code may give the model inside it another one.

Two texts in one call, a mask that hides words at random or one segment: such masks have the shape
of the batch's, and other rows. Where one of them is used, batches keep their padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapidformer.compat.torch_tensors import count_changes, locate
from rapidformer.data.batch import get_host_copy

Mask = NDArray[np.bool_]
"""[batch, tokens], true for real tokens. NumPy, which is faster than torch on small arrays."""


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
