"""Clipping: what torch's own ``clip_grad_norm_`` and ``clip_grad_value_`` ask of gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from rapidformer.compat.patches import Entry, Patch, describe_difference

PRIVATE_NAMES = {
    "torch.nn.utils.clip_grad._get_total_norm": "clip_grad_norm_ under a pipeline, or too early",
    "torch._foreach_clamp_min_": "clip_grad_value_ too early, which split tensors do not count",
}

T = TypeVar("T")
TotalNorm = Callable[[list[Tensor], float], Tensor]
Measure = Callable[[list[Tensor], float, TotalNorm], Tensor | None]
"""The norm of these gradients over more than this rank; None if they are not its concern."""


_KNOWN = ["tensors", "norm_type", "error_if_nonfinite", "foreach"]
_measures: list[Measure] = []
_checks: list[Callable[[list[Tensor]], None]] = []


def extend_total_norm(measure: Measure) -> AbstractContextManager[None]:
    """Inside, ``clip_grad_norm_`` asks ``measure`` first, wherever it was imported from."""
    return _listed(measure, _measures)


def check_clipping(check: Callable[[list[Tensor]], None]) -> AbstractContextManager[None]:
    """Inside, gradients that are to be clipped, by norm or by value, are checked first."""
    return _listed(check, _checks)


@contextmanager
def _listed(function: T, functions: list[T]) -> Iterator[None]:
    with _PATCH:
        functions.append(function)
        try:
            yield
        finally:
            functions.remove(function)


def find_unknown_norm() -> str | None:
    """How torch's own norm differs from the one we know; None if it does not."""
    return describe_difference("torch", clip_grad, "_get_total_norm", _KNOWN)


def _build_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        for check in _checks:
            check(gradients)

        def compute(some: list[Tensor], order: float) -> Tensor:
            return original(some, order, False, foreach)

        norms = (measure(gradients, float(norm_type), compute) for measure in _measures)
        norm = next((norm for norm in norms if norm is not None), None)
        if norm is None:
            return original(gradients, norm_type, error_if_nonfinite, foreach)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the norm of order {norm_type} of these gradients is {norm}.")
        return norm

    return get_total_norm


def _build_clamp(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def clamp(tensors: list[Tensor], *args: object) -> None:
        for check in _checks:
            check(tensors)
        original(tensors, *args)

    return clamp


_PATCH = Patch(
    lambda: [
        Entry(clip_grad, "_get_total_norm", _build_norm),
        Entry(torch, "_foreach_clamp_min_", _build_clamp),
    ]
)
