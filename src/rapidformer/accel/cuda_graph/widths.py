"""Whether a batch may get columns of padding, so that a few graphs cover batches of all widths.

A mean over all positions changes with the width. So before a loss gets wider batches, its passes
run on a batch twice, as it is and with more columns, and must give the same loss and gradients: the
same bits in fp32, in which mixed precision is compared as well. What the model returns for added
columns is NaN then. NaN times zero is NaN, so it also shows a term that has no weight yet. The
result holds for later updates: a replay runs the same operations, and a number that the code reads
from outside is part of the graph's key. With a tensor from outside, batches keep their widths. Each
width that batches get is compared, and again for a narrower batch if a model computes on padding.

Nothing is known beforehand of a model of the user's own. So it is compared in training mode, with
weights that hide nothing, with a few tokens, and again now and then.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rapidformer.accel.cuda_graph.columns import Columns, find_filling, widen
from rapidformer.accel.cuda_graph.comparing import measure_differences
from rapidformer.accel.cuda_graph.inputs import Inputs, find_columns
from rapidformer.accel.cuda_graph.passes import Request, RunForward
from rapidformer.accel.cuda_graph.replayed_code import ReplayedCode
from rapidformer.accel.cuda_graph.snapshot import Snapshot
from rapidformer.accel.cuda_graph.trial_modes import (
    FactorsForDropout,
    InBounds,
    NotForPadding,
    SameChoices,
)  # fmt: skip
from rapidformer.accel.unpad.rows import NO_SIZES
from rapidformer.accel.unpad.stirring import (
    SMOOTH,
    Steady,
    in_float64,
    may_use_float64,
    stir,
)
from rapidformer.compat.torch_modules import uncompiled
from rapidformer.data.batch import move_to_device
from rapidformer.data.nested import iterate_tensors, map_tensors
from rapidformer.data.update import MicroBatch
from rapidformer.errors import is_out_of_gpu_memory
from rapidformer.log import warn_once
from rapidformer.models.evaluation_mode import evaluation_mode
from rapidformer.models.watched import has_width_readers
from rapidformer.optim.gradients import take_gradients
from rapidformer.overlay import list_layers, without_layer

_FACTOR = 1.25
"""How many times as wide the compared batch is, unless that is too long for the model: enough to
show a loss that depends on it, and in fp32 not much more memory than a step takes.
"""
_LEAST_CHANGE, _MARGIN = 0.02, 4
"""A batch keeps its width if it cannot become wider by that part, or by so many times what may
differ: its loss would show too little.
"""
_COMPARED = 2
"""On how many batches a loss is compared at first."""
_LIMIT = 2.0**-11
"""How far a loss, and fp32 gradients, may differ if the run rounds to 16 bits: an eighth of bf16's
rounding.
"""
_LIMIT_16_BIT = 2.0**-5
"""The same for gradients of a model with weights in 16 bits, which fp32 cannot compare: eight times
its rounding. A loss is a mean over many tokens, so the limit above holds for it there as well.
"""
MANY_TOKENS = 4096
"""Above, a micro-batch takes so much memory that nothing is tried with all of it."""
_LIMIT_FP32 = 1e-4
"""The same if fp32 is not rounded either, for models of the user's own. transformers' own had a
trial, so these passes can only show what a loss does, and rounding may be larger in large models.
"""
_LAST_BITS = 1e-5
"""What rounding alone may change in fp32."""


class Widths:
    """Decides which batches may get more columns."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        *,
        is_16_bit: bool,
        warns: bool = True,
    ) -> None:
        self._model, self._parameters, self._device = model, parameters, device
        self._warns = warns
        are_fp32 = all(p.dtype == torch.float32 for p in parameters if p.is_floating_point())
        self._runs_in_fp32 = is_16_bit and are_fp32
        self._limit = 0.0 if not is_16_bit and are_fp32 else _LIMIT if are_fp32 else _LIMIT_16_BIT
        self._seen: Counter[int] = Counter()
        """By the hash of what a loss depends on: how many batches could be wider."""
        self._narrowest: dict[Hashable, dict[str, int]] = {}
        """By that hash and the sizes that batches get: the narrowest that was compared."""
        self._is_exact = True

    def may_change(
        self, request: Request, inputs: Sequence[Inputs | None], code: ReplayedCode
    ) -> bool:
        """Whether these inputs may be wider: by code and sizes alone, as after a resume."""
        pairs = zip(request.update, inputs, strict=True)
        grown = [(each, item) for each, item in pairs if item is not None and _grows(item)]
        for micro_batch, item in grown:
            # Labels that padding has in a batch are those that its added columns get.
            seen = hash((request.code, *(column.fill for column in item.columns.values())))
            is_padded = item.rows is None
            wider = find_columns(
                self._model, micro_batch.batch, factor=_FACTOR, is_padded=is_padded,
                least=item.sizes if is_padded else NO_SIZES,
            )  # fmt: skip
            if not self._shows_enough(micro_batch, wider):
                return False
            self._seen[seen] += 1
            is_early = self._seen[seen] <= _COMPARED
            is_due = is_early or (self._is_own and _is_power(self._seen[seen]))
            if self._is_exact and (is_due or self._is_news(seen, item)):
                take_snapshot = functools.partial(code.take_snapshot, self._device)
                self._is_exact = self._find_out(
                    request.run_forward, _keep_short_rows(micro_batch), wider, take_snapshot,
                    is_early=is_early,
                )  # fmt: skip
                self._note(seen, item)
        return self._is_exact or not grown

    def _is_news(self, seen: int, item: Inputs) -> bool:
        """Whether no batch was compared with the width that this one gets.

        If a model computes on padding, also whether none as narrow as this one was: from some width
        on, it may use another attention.
        """
        narrowest = self._narrowest.get(_describe_sizes(seen, item))
        if narrowest is None or item.rows is not None:
            return narrowest is None
        return any(width < narrowest.get(name, math.inf) for name, width in _list_widths(item))

    def _note(self, seen: int, item: Inputs) -> None:
        narrowest = self._narrowest.setdefault(_describe_sizes(seen, item), {})
        for name, width in _list_widths(item):
            narrowest[name] = min(width, narrowest.get(name, width))

    def _shows_enough(self, micro_batch: MicroBatch, columns: Columns) -> bool:
        """Whether what grows becomes so much wider that a loss which depends on it would show."""
        widths = ((c.width, micro_batch.batch[name].shape[1]) for name, c in columns.items())
        shares = [1 - own / wide for wide, own in widths if wide > own]
        return bool(shares) and min(shares) >= max(_LEAST_CHANGE, _MARGIN * self._limit)

    def _find_out(
        self, run_forward: RunForward, micro_batch: MicroBatch, columns: Columns,
        take_snapshot: Callable[[], Snapshot], *, is_early: bool,
    ) -> bool:  # fmt: skip
        if has_width_readers(self._model):
            return False
        compare = functools.partial(self._compare, run_forward, columns, take_snapshot)
        problem = compare(micro_batch)
        if problem is None and self._is_own and is_early:
            problem = self._compare_stirred(compare, micro_batch, columns)
        if problem is not None and self._warns:
            warn_once(
                f"--cuda-graph: {problem}, so batches keep their widths, and few are replayed.",
                is_local=True,
            )
        return problem is None

    def _compare_stirred(
        self, compare: Callable[..., str | None], micro_batch: MicroBatch, columns: Columns
    ) -> str | None:
        """Compare with no weight that hides something, as no trial of its own has (``filling.py``).

        Among few tokens, no large number hides the others from a maximum. And from some widths,
        convolutions and chunks drop the last columns.
        """
        widths = {name: micro_batch.batch[name].shape[1] for name in columns}
        with stir(self._model):
            problem = compare(micro_batch)
            for cut in (1, 2, 3, min(widths.values()) - 2):
                sizes = {name: width - cut for name, width in widths.items()}
                if problem is None and min(sizes.values()) > 0:
                    problem = compare(_cut(micro_batch, sizes), must_run=False)
        return problem

    @property
    def _is_own(self) -> bool:
        """Whether only this shows that columns change nothing: transformers' own had a trial."""
        return bool(find_filling(self._model).limits)

    def _get_limit(self) -> float:
        is_fp32 = torch.get_float32_matmul_precision() == "highest"
        return _LIMIT_FP32 if self._is_own and is_fp32 and self._limit == _LIMIT else self._limit

    def _compare(
        self, run_forward: RunForward, columns: Columns, take_snapshot: Callable[[], Snapshot],
        micro_batch: MicroBatch, *, must_run: bool = True,
    ) -> str | None:  # fmt: skip
        """What differs between the passes over a batch with and without these columns.

        Unless it must run, nothing does if there is no result without them. What differs in fp32
        and not in fp64 is rounding, which some models amplify.
        """
        compare = functools.partial(self._compare_once, run_forward, columns, micro_batch)
        problem = compare(take_snapshot(), must_run=must_run)
        if problem is None or not self._limit or not may_use_float64(self._model):
            return problem
        with suppress(RuntimeError), in_float64(self._model):  # there may be no memory for it
            return compare(take_snapshot()) and problem
        return problem

    def _compare_once(
        self, run_forward: RunForward, columns: Columns, micro_batch: MicroBatch, before: Snapshot,
        *, must_run: bool = True,
    ) -> str | None:  # fmt: skip
        hidden = NotForPadding(micro_batch.batch, columns)
        choices = SameChoices(micro_batch.batch, max(self._get_limit(), _LAST_BITS))

        def run(columns: Columns) -> _Results:
            batch = move_to_device(widen(micro_batch.batch, columns), self._device)
            choices.begin(is_wide=bool(columns))
            look = hidden.act(is_wide=bool(columns))
            bounds = InBounds() if self._is_own else nullcontext()
            with FactorsForDropout(), choices, SMOOTH, look, bounds:
                result = run_forward(micro_batch._replace(batch=batch))
                result.loss.backward()
            weights = [result.weight] if result.is_weight_given else []
            means = [result.loss, *weights, *(mean for mean, _ in result.parts.values())]
            values = [torch.as_tensor(mean).detach().item() for mean in means]
            changed = [tensor for tensor in before.read() if tensor.is_floating_point()]
            before.restore()
            return _Results(values, [*take_gradients(self._parameters), *changed])

        state, fewer, narrow = "without dropout", None, _Results([math.nan], [])
        in_fp32 = self._runs_in_fp32
        with _trying(self._model, before, trains=self._is_own, in_fp32=in_fp32):
            try:
                narrow = run({})
                state = "if its batch has more columns"
                wide = run(columns)
            except Exception as error:  # the user's code may expect this width, and fail in any way
                take_gradients(self._parameters)
                fewer = _halve(micro_batch) if is_out_of_gpu_memory(error) else None
                if fewer is None and (must_run or not math.isnan(narrow.means[0])):
                    first_line = next(iter(str(error).splitlines()), "")
                    return f"a step fails {state} ({type(error).__name__}: {first_line})"
        if not must_run and math.isnan(narrow.means[0]):
            return None
        if fewer is not None:  # in fp32, a step takes more memory than usual
            return self._compare_once(run_forward, columns, fewer, before, must_run=must_run)
        return _describe_difference(wide, narrow, self._get_limit())


class _Results(NamedTuple):
    """Of the passes over a batch."""

    means: list[float]
    """The loss, and what else is reported."""
    tensors: list[Tensor | None]
    """The gradients, and the buffers that have changed."""


def _describe_difference(wide: _Results, narrow: _Results, limit: float) -> str | None:
    for mine, theirs in zip(wide.means, narrow.means, strict=True):
        if math.isnan(mine) and not math.isnan(theirs):
            return (
                "the loss reads what the model returns for padding (leave it out: "
                "losses[mask], losses.masked_fill(~mask, 0) or torch.where(mask, losses, 0))"
            )
        if not math.isclose(mine, theirs, rel_tol=max(min(limit, _LIMIT), _LAST_BITS)):
            return (
                f"the loss depends on the number of columns of a batch ({theirs:.6g}; "
                f"{mine:.6g} with more padding): divide by the number of labels instead"
            )
    difference = max(measure_differences(wide.tensors, narrow.tensors), default=0.0)
    if difference > max(limit, _LAST_BITS):
        return f"gradients change if a batch has more columns (by {difference:.1e}, relative)"
    if limit == 0.0 and (difference or wide.means != narrow.means):
        return "in fp32, a batch with more columns has other last bits"
    return None


def _halve(micro_batch: MicroBatch) -> MicroBatch | None:
    """Half of its rows; None if it is not clear where they are, or there is only one."""
    tensors = list(iterate_tensors(micro_batch.batch))
    counts = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
    if len(counts) != 1 or max(counts) < 2:
        return None
    half = max(counts) // 2
    return micro_batch._replace(batch=map_tensors(micro_batch.batch, lambda _, t: t[:half]))


def _list_widths(inputs: Inputs) -> list[tuple[str, int]]:
    """Of what may grow, before it does."""
    return [(name, inputs.batch[name].shape[1]) for name in inputs.columns]


def _grows(inputs: Inputs) -> bool:
    return any(inputs.columns[name].width > width for name, width in _list_widths(inputs))


def _describe_sizes(seen: int, item: Inputs) -> Hashable:
    # How many real tokens there are depends on their lengths, not on the width.
    return seen, item.sizes if item.rows is None else item.sizes[:2]


def _keep_short_rows(micro_batch: MicroBatch) -> MicroBatch:
    """A large micro-batch as its two shortest rows that have a label, in all their columns."""
    mask, labels = (micro_batch.batch.get(name) for name in ("attention_mask", "labels"))
    tensors = list(iterate_tensors(micro_batch.batch))
    if mask is None or mask.numel() <= MANY_TOKENS:  # padding is computed, too
        return micro_batch
    if any(tensor.shape[:1] != mask.shape[:1] for tensor in tensors):
        return micro_batch
    lengths = mask.sum(1).cpu()
    if isinstance(labels, Tensor) and labels.dim() > 1:
        lengths[(labels[:, 1:] == -100).all(1).cpu()] = mask.shape[1] + 1
    rows = lengths.argsort()[:2]
    cut = map_tensors(micro_batch.batch, lambda _, tensor: tensor[rows.to(tensor.device)])
    return micro_batch._replace(batch=cut)


@contextmanager
def _trying(model: nn.Module, before: Snapshot, *, trains: bool, in_fp32: bool) -> Iterator[None]:
    """Without dropout, compilation and, if asked for, rounding to 16 bits."""
    rounds = in_fp32 and "autocast" in list_layers(model)
    precision = without_layer(model, "autocast") if rounds else nullcontext()
    # It may be entered already: inside the call of the model, or by the user.
    here = torch.autocast(before.device.type, enabled=False) if in_fp32 else nullcontext()
    mode = Steady(model) if trains else evaluation_mode(model)
    try:
        with precision, here, mode, uncompiled(model.modules()):
            yield
    finally:
        before.restore()


def _cut(micro_batch: MicroBatch, widths: Mapping[str, int]) -> MicroBatch:
    """The first tokens of its rows."""
    cut = map_tensors(micro_batch.batch, lambda name, tensor: tensor[:, : widths.get(name)]
                      if name in widths else tensor)  # fmt: skip
    return micro_batch._replace(batch=cut)


def _is_power(number: int) -> bool:
    """Whether it is a power of four: numbers at which a model of the user's own is compared again.

    What it computes on padding may be zero for as long as no number exceeds a limit.
    """
    return number.bit_count() == 1 and number.bit_length() % 2 == 1
