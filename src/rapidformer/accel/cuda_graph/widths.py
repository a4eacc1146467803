"""Whether a loss stays the same if its batch gets columns of padding.

A model may ignore them, and the user's loss may not: a mean over all positions, padded ones
included, changes with the width of the batch. So the loss of a batch is compared once with that of
the same batch with more padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rapidformer.accel.cuda_graph.inputs import Inputs, find_columns
from rapidformer.accel.cuda_graph.passes import RunForward
from rapidformer.accel.cuda_graph.recorder import Snapshot
from rapidformer.accel.unpad.columns import Columns, widen
from rapidformer.compat.torch_modules import uncompiled
from rapidformer.data.batch import move_to_device
from rapidformer.data.update import MicroBatch, MicroBatchResult, Update
from rapidformer.log import warn_once
from rapidformer.models.evaluation_mode import evaluation_mode
from rapidformer.models.watched import has_width_readers

_FACTOR = 2
"""How many times as wide the compared batch is, unless that is too long for the model."""
_LEAST_FACTOR = 1.02
"""A batch that cannot become this much wider keeps its width: its loss would show nothing."""
_LIMIT = 1e-4
"""How far the two losses may differ, relative."""
_LIMIT_16_BIT = 2e-2


class LossWidths:
    """Decides which batches may get more columns."""

    def __init__(self, model: nn.Module, device: torch.device, *, is_16_bit: bool) -> None:
        self._model = model
        self._device = device
        self._limit = _LIMIT_16_BIT if is_16_bit else _LIMIT
        self._is_ignored: bool | None = None

    def may_change(
        self,
        run_forward: RunForward,
        update: Update,
        inputs: Sequence[Inputs | None],
        take_snapshot: Callable[[], Snapshot],
    ) -> bool:
        """Whether these inputs may be wider than the micro-batches that they are made from.

        The answer depends on the sizes of the update and on the loss alone, so that a resumed run
        continues with the same sizes.
        """
        grown = [each for each, found in zip(update, inputs, strict=True) if _grows(found)]
        compared = [(each, find_columns(self._model, each.batch, factor=_FACTOR)) for each in grown]
        factors = [_get_factor(each, columns) for each, columns in compared]
        if not grown or min(factors) < _LEAST_FACTOR:
            return not grown
        if self._is_ignored is None and has_width_readers(self._model):
            self._is_ignored = False
        if self._is_ignored is None:
            micro_batch, columns = compared[0]
            # A mean over all positions would change by more than this.
            limit = min(self._limit, (1 - 1 / factors[0]) / 4)
            with _evaluating(self._model, take_snapshot()):
                self._is_ignored = self._compare(run_forward, micro_batch, columns, limit)
        return bool(self._is_ignored)

    def _compare(
        self, run_forward: RunForward, micro_batch: MicroBatch, columns: Columns, limit: float
    ) -> bool | None:
        """Whether the loss stays the same with these columns; None if it is not finite."""

        def read(columns: Columns) -> list[float]:
            batch = move_to_device(widen(micro_batch.batch, columns), self._device)
            with _FactorsForDropout():
                return _list_means(run_forward(micro_batch._replace(batch=batch)))

        state = "in evaluation mode"
        try:
            expected = read({})
            state = "if its batch has more columns"
            found = read(columns)
        except Exception as error:  # the user's code may expect this width, and fail in any way
            first_line = next(iter(str(error).splitlines()), "")
            _warn(f"a step fails {state} ({type(error).__name__}: {first_line})")
            return False
        if not all(map(math.isfinite, expected)):
            return None
        for mine, theirs in zip(found, expected, strict=True):
            if not math.isclose(mine, theirs, rel_tol=limit):
                _warn(
                    f"the loss depends on the number of columns of a batch ({theirs:.4g}; "
                    f"{mine:.4g} with more padding)",
                    " Leave padding out of the loss and of its mean to train faster.",
                )
                return False
        return True


def _warn(reason: str, advice: str = "") -> None:
    warn_once(
        f"--cuda-graph: {reason}, so batches keep their widths, and few are replayed.{advice}",
        is_local=True,
    )


def _grows(inputs: Inputs | None) -> bool:
    return inputs is not None and any(
        column.width > inputs.batch[name].shape[1] for name, column in inputs.columns.items()
    )


def _get_factor(micro_batch: MicroBatch, columns: Columns) -> float:
    """How much wider the tensor becomes that grows least."""
    return min(
        float(column.width / micro_batch.batch[name].shape[1]) for name, column in columns.items()
    )


class _FactorsForDropout(TorchFunctionMode):
    """Instead of dropping values, each dropout multiplies by its own factor, whatever the width.

    In evaluation mode, two passes over a batch are equal, so a loss over their difference (R-Drop)
    would be zero at every width.
    """

    _calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not functional.dropout:
            return result
        self._calls += 1
        return result * (1 + 0.5 * math.sin(self._calls))


@contextmanager
def _evaluating(model: nn.Module, before: Snapshot) -> Iterator[None]:
    """Without dropout, gradients and compilation."""
    try:
        with evaluation_mode(model), uncompiled(model.modules()), torch.no_grad():
            yield
    finally:
        before.restore()


def _list_means(result: MicroBatchResult) -> list[float]:
    weights = [result.weight] if result.is_weight_given else []
    numbers: list[float | Tensor] = [result.loss, *weights]
    return [float(each) for each in [*numbers, *(mean for mean, _ in result.parts.values())]]
