"""What scores that do not exist yet are: queries times keys, a scale, and a bias.

All operations of a model's code on its scores end up in these, so that one fused kernel computes
them. The bias is kept as small as it is: a mask that is the same for all heads stays so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rapidformer.accel.later import Noted, have_changed, note_version

Shape = tuple[int, ...]
ABSORBING = -1e30
"""Added to a score in fp32 or bf16, a number below this leaves nothing of it."""


@dataclass(frozen=True)
class Form:
    """Scores, or weights: their softmax."""

    module: nn.Module
    """The attention module."""
    query: Tensor
    """[*, queries, size]"""
    key: Tensor
    """[*, size, keys]"""
    lead: Shape
    """The dimensions before queries and keys; split as finely as any operation has split them."""
    scale: float = 1.0
    bias: Tensor | None = None
    """Of as many dimensions as ``lead`` and two more, each of them maybe 1."""
    noted: tuple[Noted, ...] = ()
    """Tensors of the model's own among these, and how often each had been changed in place."""
    is_weights: bool = False
    dropout: float = 0.0

    @property
    def is_current(self) -> bool:
        """Whether nothing that it is made of was changed in place."""
        return not have_changed(self.noted)

    @property
    def ends(self) -> Shape:
        """The number of queries and of keys."""
        return self.query.shape[-2], self.key.shape[-1]

    def multiply(self, factor: float) -> Form:
        """Multiplied by a number."""
        bias = None if self.bias is None else self.bias * factor
        return replace(self, scale=self.scale * factor, bias=bias)

    def multiply_rows(self, factor: Tensor, shape: Shape, *, divides: bool) -> Form | None:
        """Multiplied, or divided, by a tensor that is the same for all keys."""
        laid_out = self.lay_out(factor, shape)
        if laid_out is None or laid_out.shape[-1] != 1:
            return None
        laid_out = 1 / laid_out if divides else laid_out
        query = self.query.reshape(*self.lead, *self.query.shape[-2:]) * laid_out
        bias = None if self.bias is None else self.bias * laid_out
        return replace(self, query=query.to(self.query.dtype), bias=bias)

    def add(self, term: Tensor, shape: Shape) -> Form | None:
        """With a tensor added that is broadcast with scores of this shape."""
        laid_out = self.lay_out(term, shape)
        if laid_out is None:
            return None
        if self.bias is None:
            return replace(self, bias=laid_out, noted=(*self.noted, note_version(term)))
        return replace(self, bias=self.bias + laid_out)

    def fill(self, mask: Tensor, value: float, shape: Shape) -> Form | None:
        """With such a value that nothing is left of a score where the mask is True."""
        laid_out = self.lay_out(mask, shape)
        if laid_out is None or not value < ABSORBING:
            return None
        bias = self.query.new_zeros((), dtype=torch.float32) if self.bias is None else self.bias
        bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
        value = max(value, torch.finfo(bias.dtype).min) if math.isfinite(value) else value
        return replace(self, bias=torch.where(laid_out, value, bias))

    def view(self, shape: Shape, before: Shape) -> Form | None:
        """In another shape than before, if that splits or joins no queries and keys."""
        lead = shape[:-2]
        if shape[-2:] != self.ends:
            return None
        if group(lead, self.lead) is not None:
            return self
        groups = group(self.lead, lead)
        if groups is None or before[:-2] != self.lead:
            return None
        bias = None if self.bias is None else _split(self.bias, groups)
        return replace(self, lead=lead, bias=bias)

    def lay_out(self, tensor: Tensor, shape: Shape) -> Tensor | None:
        """A tensor that is broadcast with scores of this shape, in the dimensions of ``lead``."""
        if len(tensor.shape) > len(shape):
            return None
        tensor = tensor[(None,) * (len(shape) - tensor.dim())]
        if any(has not in (1, full) for has, full in zip(tensor.shape, shape, strict=True)):
            return None
        groups = group(shape[:-2], self.lead)
        return None if groups is None else _split(tensor, groups)


def group(coarse: Sequence[int], fine: Sequence[int]) -> list[Shape] | None:
    """The dimensions into which each one is split; None if ``fine`` does not split them."""
    groups: list[Shape] = []
    rest = list(fine)
    for size in coarse:
        part: list[int] = []
        while not part or math.prod(part) < size:
            if not rest:
                return None
            part.append(rest.pop(0))
        if math.prod(part) != size:
            return None
        groups.append(tuple(part))
    if groups and all(size == 1 for size in rest):
        groups[-1] = (*groups[-1], *rest)
        rest = []
    return None if rest else groups


def _split(tensor: Tensor, groups: Sequence[Shape]) -> Tensor:
    """Split leading dimensions; one that is broadcast stays so."""
    sizes = [
        size if full else 1
        for has, part in zip(tensor.shape[:-2], groups, strict=True)
        for size, full in ((each, has == math.prod(part)) for each in part)
    ]
    return tensor.reshape(*sizes, *tensor.shape[-2:])
