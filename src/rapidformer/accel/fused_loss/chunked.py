"""Cross entropy of a linear head's outputs, a chunk of rows at a time.

The logits of a large vocabulary are the largest tensor of a step: fp32 logits of 16,384 tokens
over 128,256 words take 8 GB, and their gradient as much again. Here a chunk's logits exist only
until its loss and its gradients are known. So the forward pass already computes the gradients of
hidden states and head, as if the loss's own gradient were 1, and the backward pass scales them.

A loss for each row (``is_by_row``) has a gradient for each row. That of the hidden states is scaled
row by row. That of the head adds up rows, so the backward pass computes their logits once more.

Logits that a head has computed already are taken as rows without a head (``weight`` is None): their
gradient is as large as they are, and is computed in the backward pass only.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.accel.fused_loss.divergence import Divergence, Teacher
from rapidformer.accel.fused_loss.noted import note
from rapidformer.accel.fused_loss.scoring import score
from rapidformer.accel.fused_loss.selection import select_labelled
from rapidformer.compat.torch_tensors import multiply_all
from rapidformer.compat.triton import has_triton
from rapidformer.dist.vocabulary import Scored, VocabularySlice, check_ids
from rapidformer.errors import TrainingError

Step = Callable[[Tensor], Tensor]
"""What a model does to each logit before the loss, such as a soft cap."""
Needs = tuple[bool, bool, bool]
"""Whether hidden states, weight and bias need a gradient."""

_CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**30}
"""Size of a chunk's logits in fp32: enough for fast matrix products, little next to a model."""

_HEADROOM = 2.0**8
"""fp16 rows are divided by this before they are summed. A power of two costs no bits near 1."""


@dataclass(frozen=True)
class Recipe:
    """How to compute losses from the head's outputs."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    steps: tuple[Step, ...] = ()
    words: VocabularySlice | None = None
    """Set if the head has only this rank's slice of the vocabulary. Then ``hidden`` and the loss
    are the same on all ranks, and the gradient of ``hidden`` is this rank's term of a sum."""
    is_by_row: bool = False
    """Whether each row's loss is wanted, not their sum."""
    has_statistics: bool = False
    """Whether each row's entropy, mean logit and whether its label is the best one are wanted."""
    labelled: Tensor | None = None
    """Which rows have a label, if that is known."""
    noted: list[Tensor] | None = None
    """Gets the losses of each chunk's rows if somebody notes them."""
    divergence: Divergence | None = None
    """Set if the loss is a divergence from a teacher. Its statistics are divergences and losses."""

    @property
    def num_statistics(self) -> int:
        return 2 if self.divergence is not None else 3 if self.has_statistics else 0

    def run_steps(self, logits: Tensor) -> Tensor:
        """Apply the steps to the head's outputs."""
        for step in self.steps:
            logits = step(logits)
        return logits


class Losses(NamedTuple):
    """The sum of the rows' losses, or each of them; and their statistics alike, if wanted."""

    values: Tensor
    statistics: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> Losses:
        """The same function of both."""
        statistics = None if self.statistics is None else function(self.statistics)
        return Losses(function(self.values), statistics)


def compute_losses(
    hidden: Tensor, weight: Tensor | None, bias: Tensor | None, labels: Tensor, recipe: Recipe,
    teacher: Teacher | None = None,
) -> Losses:  # fmt: skip
    """The cross entropies of ``hidden @ weight.T + bias``, a row per label, in fp32."""
    selection = select_labelled(hidden, labels, recipe.ignore_index, recipe.labelled)
    all_labels = labels
    hidden, labels = selection.rows, selection.labels
    teacher = None if teacher is None else teacher.map_rows(selection.take)
    if recipe.words is not None:  # as torch's own loss does
        check_ids(labels, recipe.words.length, "a label", recipe.ignore_index)
    if torch.is_grad_enabled():
        losses, statistics = _ChunkedLoss.apply(hidden, weight, bias, labels, recipe, teacher)
    else:
        needs = (False, False, False)
        losses, statistics, _ = _compute(hidden, weight, bias, labels, recipe, teacher, needs)
    if recipe.noted:
        note(selection.put_back(torch.cat(recipe.noted)), all_labels, recipe.ignore_index)
    if recipe.is_by_row:
        losses = selection.put_back(losses)
        statistics = None if statistics is None else selection.put_back(statistics.T).T
    elif statistics is not None:
        statistics = statistics.sum(-1)
    return Losses(losses, statistics)


class _ChunkedLoss(torch.autograd.Function):
    """The losses, with gradients that the forward pass has already computed as far as it can."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        labels: Tensor,
        recipe: Recipe,
        teacher: Teacher | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.recipe, ctx.teacher = recipe, teacher
        ctx.needs = ctx.needs_input_grad[:3]
        ctx.now, ctx.later = _split_needs(ctx.needs, recipe, has_head=weight is not None)
        losses, statistics, gradients = _compute(
            hidden, weight, bias, labels, recipe, teacher, ctx.now
        )
        ctx.gradients = gradients
        if statistics is not None:
            ctx.mark_non_differentiable(statistics)
        return losses, statistics

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True: this gradient will be differentiated too
            return *_differentiate_plainly(ctx, gradient), None, None, None
        hidden, weight, bias, labels = ctx.saved_tensors
        recipe = replace(ctx.recipe, has_statistics=False, noted=None)  # the forward pass had them
        compute = functools.partial(_compute, hidden, weight, bias, labels, recipe, ctx.teacher)
        # Drop our reference, so that a gradient can become ``.grad`` without a copy. A second
        # backward pass through the same graph computes them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            *_, gradients = compute(ctx.now)
        for computed in gradients:
            if computed is not None and ctx.recipe.is_by_row:
                computed *= gradient[:, None]
            elif computed is not None:
                multiply_all([computed], gradient)  # faster than mul_ with a scalar on a GPU
        if any(ctx.later):
            *_, later = compute(ctx.later, gradient.expand(len(hidden)))
            gradients = [a if b is None else b for a, b in zip(gradients, later, strict=True)]
        return *gradients, None, None, None


def _split_needs(needs: Needs, recipe: Recipe, *, has_head: bool) -> tuple[Needs, Needs]:
    """Which gradients the forward pass computes, and which the backward pass."""
    nothing = (False, False, False)
    if not has_head:
        return nothing, needs
    if recipe.is_by_row:
        return (needs[0], False, False), (False, *needs[1:])
    return needs, nothing


def _differentiate_plainly(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    """The gradients, themselves differentiable, from all logits at once."""
    if ctx.teacher is not None:
        raise TrainingError(
            "a gradient of a gradient (create_graph=True) cannot pass through the divergence from "
            "a teacher."
        )
    hidden, weight, bias, labels = ctx.saved_tensors
    # Aliases: a parameter's hooks must run only when the caller computes its gradient, not here.
    hidden = hidden.view_as(hidden)
    weight, bias = (None if each is None else each.view_as(each) for each in (weight, bias))
    product = hidden
    if weight is not None:
        # Cast by hand: autocast has ended by now.
        offset = None if bias is None else bias.to(hidden.dtype)
        product = functional.linear(hidden, weight.to(hidden.dtype), offset)
    words = ctx.recipe.words
    logits = ctx.recipe.run_steps(product if words is None else words.join(product))
    loss = functional.cross_entropy(
        logits.float(), labels, ignore_index=ctx.recipe.ignore_index,
        reduction="none" if ctx.recipe.is_by_row else "sum",
        label_smoothing=ctx.recipe.label_smoothing,
    )  # fmt: skip
    wanted: Any = list(itertools.compress((hidden, weight, bias), ctx.needs))
    gradients = iter(torch.autograd.grad(loss, wanted, gradient, create_graph=True))
    return [next(gradients) if is_needed else None for is_needed in ctx.needs]


def _compute(
    hidden: Tensor, weight: Tensor | None, bias: Tensor | None, labels: Tensor, recipe: Recipe,
    teacher: Teacher | None, needs: Needs, factors: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:  # fmt: skip
    """The losses, their statistics, and the gradients that are needed; each row by its factor."""
    dtype = hidden.dtype if weight is None else get_compute_type(hidden)
    table = None if weight is None else weight.to(dtype)
    offset = None if bias is None else bias.to(dtype)
    sums = _Sums(hidden, weight, bias, recipe, needs)
    width = hidden.shape[-1] if weight is None else len(weight)
    size = choose_chunk(
        len(hidden), width if recipe.words is None else recipe.words.width, hidden.device
    )
    if teacher is not None:
        size = max(size // 4, 1)  # several tensors as large as the logits
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            rows = hidden[part].to(dtype)
            if table is not None:
                logits = functional.linear(rows, table, offset)
            else:
                logits = rows.clone() if _overwrites(rows, recipe) else rows
            other = None if teacher is None else teacher.compute_logits(part.start, part.stop)
            scored = _run_chunk(logits, labels[part], recipe, other, has_gradient=any(needs))
            sums.add(part, rows, table, scored, None if factors is None else factors[part, None])
    return sums.finish()


class _Sums:
    """What all chunks add up to."""

    def __init__(
        self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, recipe: Recipe,
        needs: Needs,
    ) -> None:  # fmt: skip
        count, device = len(hidden), hidden.device
        self._is_by_row, self._noted = recipe.is_by_row, recipe.noted
        shape = (count,) if recipe.is_by_row else ()
        self._losses = torch.zeros(shape, dtype=torch.float32, device=device)
        self._statistics = self._losses.new_empty(recipe.num_statistics, count)
        self._of_hidden = torch.empty_like(hidden) if needs[0] else None

        def build(parameter: Tensor) -> Tensor:
            # Sums over all rows may overflow fp16. Autograd casts them back after they are scaled.
            wide = torch.float32 if parameter.dtype == torch.float16 else parameter.dtype
            return torch.zeros_like(parameter, dtype=wide)

        self._of_weight = build(weight) if weight is not None and needs[1] else None
        self._of_bias = build(bias) if bias is not None and needs[2] else None

    def add(
        self, part: slice, rows: Tensor, table: Tensor | None, scored: Scored,
        factors: Tensor | None,
    ) -> None:  # fmt: skip
        """Add a chunk."""
        if self._noted is not None:
            self._noted.append(scored.losses.detach())
        if self._is_by_row:
            self._losses[part] = scored.losses
        else:
            self._losses += scored.losses.sum()
        if scored.statistics is not None:
            self._statistics[:, part] = scored.statistics
        gradient = scored.gradient
        if gradient is None:
            return
        if self._of_hidden is not None:
            of_rows = gradient if table is None else gradient @ table
            self._of_hidden[part] = of_rows if factors is None else of_rows * factors
        if factors is not None:
            # Not the gradient, which is larger.
            rows = (rows * factors).to(rows.dtype)
        if self._of_weight is not None:
            _add_product(self._of_weight, gradient, rows)
        if self._of_bias is not None:
            of_bias = gradient if factors is None else gradient * factors
            self._of_bias += of_bias.sum(0, dtype=torch.float32)

    def finish(self) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
        statistics = self._statistics if len(self._statistics) else None
        return self._losses, statistics, [self._of_hidden, self._of_weight, self._of_bias]


def get_compute_type(hidden: Tensor) -> torch.dtype:
    """The dtype that a linear layer would compute in, here and now."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def choose_chunk(rows: int, width: int, device: torch.device) -> int:
    """Rows per chunk: a power of two, which suits matrix products best."""
    most = max(_CHUNK_BYTES.get(device.type, 2**28) // (4 * width), 128)
    return 1 << min(most.bit_length() - 1, max(rows - 1, 0).bit_length())


def _add_product(total: Tensor, gradient: Tensor, rows: Tensor) -> None:
    """Add ``gradient.T @ rows`` to ``total``, which may have a wider dtype."""
    if total.is_cuda and total.dtype == torch.float32 != gradient.dtype:
        # The matrix product itself adds in fp32.
        torch.addmm(total, gradient.T, rows, out_dtype=torch.float32, out=total)
    elif gradient.dtype == torch.float16:
        # A chunk's sum may overflow, and the loss scale is applied too late to prevent that.
        total.add_(gradient.T @ (rows / _HEADROOM), alpha=_HEADROOM)
    elif total.dtype == gradient.dtype:
        total.addmm_(gradient.T, rows)
    else:
        total += gradient.T @ rows


def _run_chunk(
    logits: Tensor, labels: Tensor, recipe: Recipe, teacher: Tensor | None, *, has_gradient: bool
) -> Scored:
    """A chunk's losses, and the gradient of its logits, which may be overwritten."""
    if not recipe.steps:
        return _score_fast(logits, labels, recipe, teacher, has_gradient=has_gradient)
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_(has_gradient)
        changed = recipe.run_steps(leaf)
    values = changed.detach()
    if _overwrites(values, recipe):
        values = values.clone()  # a step's gradient may need its output, as that of tanh does
    scored = _score_fast(values, labels, recipe, teacher, has_gradient=has_gradient)
    if scored.gradient is None:
        return scored
    (gradient,) = torch.autograd.grad(changed, leaf, scored.gradient.to(changed.dtype))
    return scored._replace(gradient=gradient)


def _score_fast(
    logits: Tensor, labels: Tensor, recipe: Recipe, teacher: Tensor | None, *, has_gradient: bool
) -> Scored:
    """Losses and gradients in the fastest way available, which may overwrite the logits."""
    if teacher is not None:
        return _score_divergence(logits, labels, recipe, teacher, has_gradient=has_gradient)
    if recipe.words is not None:
        run: Callable[..., Scored] = recipe.words.score
    elif _overwrites(logits, recipe):
        from rapidformer.accel.fused_loss.kernel import score_in_place as run
    else:
        run = score
    return run(
        logits, labels, recipe.ignore_index, recipe.label_smoothing,
        has_gradient=has_gradient, has_statistics=recipe.has_statistics,
    )  # fmt: skip


def _score_divergence(
    logits: Tensor, labels: Tensor, recipe: Recipe, teacher: Tensor, *, has_gradient: bool
) -> Scored:
    divergence = recipe.divergence
    assert divergence is not None
    dtype, labelled = logits.dtype, None
    compared = divergence.compare(logits, teacher, recipe.words, has_gradient=has_gradient)
    if divergence.label_weight:
        labelled = _score_fast(logits, labels, recipe, None, has_gradient=has_gradient)
    scored = divergence.join(compared, labelled, labels != recipe.ignore_index)
    gradient = None if scored.gradient is None else scored.gradient.to(dtype)
    return scored._replace(gradient=gradient)


def _overwrites(logits: Tensor, recipe: Recipe) -> bool:
    """Whether ``_score_fast`` overwrites these logits: the Triton kernel does."""
    return recipe.words is None and has_triton(logits.device)
