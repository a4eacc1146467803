"""Cross entropy of a linear head's outputs, a chunk of rows at a time.

The logits of a large vocabulary are the largest tensor of a step: fp32 logits of 16,384 tokens
over 128,256 words take 8 GB, and their gradient as much again. Here a chunk's logits exist only
until its loss and its gradients are known. So the forward pass already computes the gradients of
hidden states and head, as if the loss's own gradient were 1, and the backward pass scales them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from rapidformer.accel.unpad.on_demand import settle
from rapidformer.accel.unpad.tokenwise import pick_labelled
from rapidformer.compat.torch_tensors import multiply_all
from rapidformer.compat.triton import has_triton
from rapidformer.dist.regions import Group, gather_out, get_slice_bounds, slice_in
from rapidformer.dist.vocabulary import check_ids, compare_rows

Step = Callable[[Tensor], Tensor]
"""What a model does to each logit before the loss, such as a soft cap."""

_CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**30}
"""Size of a chunk's logits in fp32: enough for fast matrix products, little next to a model."""

_HEADROOM = 2.0**8
"""fp16 rows are divided by this before they are summed. A power of two costs no bits near 1."""


@dataclass(frozen=True)
class VocabularySlice:
    """This rank's slice of the vocabulary, under tensor parallelism.

    Ranks exchange two small reductions per chunk of rows, as they do for undeferred logits.
    """

    group: Group
    length: int
    """Words in the whole vocabulary."""

    @property
    def width(self) -> int:
        """Words in the largest slice: all ranks must choose the same chunks."""
        return -(-self.length // dist.get_world_size(self.group))

    def cut(self, weight: Tensor) -> Tensor:
        """This rank's slice of a weight, unless it is a slice already."""
        return slice_in(weight, 0, self.group) if len(weight) == self.length else weight

    def join(self, logits: Tensor) -> Tensor:
        """The logits of all words."""
        return gather_out(logits, -1, self.length, self.group)

    def differentiate(
        self, logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """The sum of the rows' cross entropies, and its gradient for this rank's logits."""
        is_kept = labels != ignore_index
        first, _ = get_slice_bounds(self.length, self.group)
        rows = compare_rows(logits.float(), labels.masked_fill(~is_kept, -1), first, self.group)
        losses = rows.normalizers - (1 - smoothing) * rows.chosen
        gradient = rows.probabilities
        if smoothing:
            losses = losses - smoothing / self.length * rows.sums
            gradient -= smoothing / self.length
        if gradient.shape[-1]:
            of_label = rows.is_mine.to(gradient.dtype)[:, None] * (smoothing - 1)
            gradient.scatter_add_(1, rows.index[:, None], of_label)
        gradient.masked_fill_(~is_kept[:, None], 0.0)
        return losses.masked_fill(~is_kept, 0.0).sum(), gradient.to(logits.dtype)


@dataclass(frozen=True)
class Recipe:
    """How to compute losses from the head's outputs."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    steps: tuple[Step, ...] = ()
    words: VocabularySlice | None = None
    """Set if the head has only this rank's slice of the vocabulary. Then ``hidden`` and the loss
    are the same on all ranks, and the gradient of ``hidden`` is this rank's term of a sum."""

    def run_steps(self, logits: Tensor) -> Tensor:
        """Apply the steps to the head's outputs."""
        for step in self.steps:
            logits = step(logits)
        return logits


def sum_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, recipe: Recipe
) -> Tensor:
    """The sum of the cross entropies of ``hidden @ weight.T + bias``, a row per label, in fp32."""
    picked = pick_labelled(hidden, labels, recipe.ignore_index)
    hidden, labels = (settle(hidden), labels) if picked is None else picked
    if hidden.device.type == "cpu":
        # Not on a GPU: the host would wait to learn how many rows are selected.
        is_kept = labels != recipe.ignore_index
        hidden, labels = hidden[is_kept], labels[is_kept]
    if recipe.words is not None:  # as torch's own loss does
        check_ids(labels, recipe.words.length, "a label", recipe.ignore_index)
    total: Tensor = _ChunkedLoss.apply(hidden, weight, bias, labels, recipe)  # type: ignore[no-untyped-call]
    return total


class _ChunkedLoss(torch.autograd.Function):
    """``sum_losses`` with gradients that the forward pass has already computed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        recipe: Recipe,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.recipe = recipe
        ctx.needs = ctx.needs_input_grad[:3]
        total, ctx.gradients = _compute(hidden, weight, bias, labels, recipe, ctx.needs)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, bias, labels = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: this gradient will be differentiated too
            return *_differentiate_plainly(ctx, gradient), None, None
        # Drop our reference, so that a gradient can become ``.grad`` without a copy. A second
        # backward pass through the same graph computes them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            _, gradients = _compute(hidden, weight, bias, labels, ctx.recipe, ctx.needs)
        for computed in gradients:
            if computed is not None:
                multiply_all([computed], gradient)  # faster than mul_ with a scalar on a GPU
        return *gradients, None, None


def _differentiate_plainly(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    """The gradients, themselves differentiable, from all logits at once."""
    hidden, weight, bias, labels = ctx.saved_tensors
    # Aliases: a parameter's hooks must run only when the caller computes its gradient, not here.
    hidden, weight = hidden.view_as(hidden), weight.view_as(weight)
    bias = None if bias is None else bias.view_as(bias)
    # Cast by hand: autocast has ended by now.
    offset = None if bias is None else bias.to(hidden.dtype)
    product = functional.linear(hidden, weight.to(hidden.dtype), offset)
    words = ctx.recipe.words
    logits = ctx.recipe.run_steps(product if words is None else words.join(product))
    loss = functional.cross_entropy(
        logits.float(), labels, ignore_index=ctx.recipe.ignore_index, reduction="sum",
        label_smoothing=ctx.recipe.label_smoothing,
    )  # fmt: skip
    wanted: Any = list(itertools.compress((hidden, weight, bias), ctx.needs))
    gradients = iter(torch.autograd.grad(loss, wanted, gradient, create_graph=True))
    return [next(gradients) if is_needed else None for is_needed in ctx.needs]


def _compute(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    recipe: Recipe,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """The sum of all losses, and the gradients that are needed."""
    dtype = get_compute_type(hidden)
    table = weight.to(dtype)
    offset = None if bias is None else bias.to(dtype)
    of_hidden = torch.empty_like(hidden) if needs[0] else None
    # Sums over all rows may overflow fp16. Autograd casts them back after they are scaled.
    wide = torch.float32 if weight.dtype == torch.float16 else weight.dtype
    of_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
    of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    width = len(weight) if recipe.words is None else recipe.words.width
    size = _choose_chunk(len(hidden), width, hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), size):
            rows = hidden[start : start + size].to(dtype)
            chosen = labels[start : start + size]
            logits = functional.linear(rows, table, offset)
            losses, gradient = _run_chunk(logits, chosen, recipe)
            total += losses
            if of_hidden is not None:
                of_hidden[start : start + size] = gradient @ table
            if of_weight is not None:
                _add_product(of_weight, gradient, rows)
            if of_bias is not None:
                of_bias += gradient.sum(0, dtype=torch.float32)
    return total, [of_hidden, of_weight, of_bias]


def get_compute_type(hidden: Tensor) -> torch.dtype:
    """The dtype that a linear layer would compute in, here and now."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _choose_chunk(rows: int, width: int, device: torch.device) -> int:
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


def _run_chunk(logits: Tensor, labels: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """The sum of a chunk's losses, and the gradient of its logits."""
    if not recipe.steps:
        return _differentiate_fast(logits, labels, recipe)
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        changed = recipe.run_steps(leaf)
    values = changed.detach()
    if _overwrites(values, recipe):
        values = values.clone()  # a step's gradient may need its output, as that of tanh does
    losses, gradient = _differentiate_fast(values, labels, recipe)
    return losses, torch.autograd.grad(changed, leaf, gradient)[0]


def _differentiate_fast(logits: Tensor, labels: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """``differentiate`` in the fastest way available, which may overwrite the logits."""
    if recipe.words is not None:
        run = recipe.words.differentiate
    elif _overwrites(logits, recipe):
        from rapidformer.accel.fused_loss.kernel import differentiate_in_place as run
    else:
        run = differentiate
    return run(logits, labels, recipe.ignore_index, recipe.label_smoothing)


def _overwrites(logits: Tensor, recipe: Recipe) -> bool:
    """Whether ``_differentiate_fast`` overwrites these logits: the Triton kernel does."""
    return recipe.words is None and has_triton(logits.device)


def differentiate(
    logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The sum of the rows' cross entropies, and its gradient in the logits' dtype."""
    is_ignored = (labels == ignore_index)[:, None]
    index = labels[:, None].masked_fill(is_ignored, 0)
    log_probabilities = functional.log_softmax(logits.float(), -1)
    losses = log_probabilities.gather(1, index) * (smoothing - 1)
    if smoothing:
        losses -= smoothing * log_probabilities.mean(-1, keepdim=True)
    # In place from here on: this is the largest tensor.
    gradient = log_probabilities.exp_()
    if smoothing:
        gradient -= smoothing / gradient.shape[-1]
    gradient.scatter_add_(1, index, torch.full_like(losses, smoothing - 1))
    gradient.masked_fill_(is_ignored, 0.0)
    return losses.masked_fill_(is_ignored, 0.0).sum(), gradient.to(logits.dtype)
