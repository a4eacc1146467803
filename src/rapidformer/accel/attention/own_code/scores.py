"""Scores and weights that are computed only if something other than fused attention needs them.

A model's code gets ``Scores`` for the product of queries and keys. What it does to scores is noted
(``rules.py``), and the product with values is fused attention. Any other operation computes them,
by the same operations in the same order as without us.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.accel import later
from rapidformer.accel.attention.own_code.form import Form, Shape
from rapidformer.accel.later import LateTensor
from rapidformer.compat.torch_dispatch import (
    convert_function_arguments,
    tree_leaves,
    tree_map_only,
    without_torch_dispatch,
    without_torch_function,
)
from rapidformer.errors import RapidformerError

Result = Any
"""A form, a finished tensor, or NotImplemented if the scores must be computed after all."""
FOLLOWED: dict[Any, Callable[..., Result]] = {}
"""Operation -> rule, which gets the operation's arguments, nodes in place of scores."""
IN_PLACE: dict[Any, Any] = {}
"""Operations that change scores in place, and those that return the changed ones."""


DROPOUT = functional.dropout
SOFTMAX = functional.softmax
_LIKE = {
    getattr(place, name)
    for place, names in (
        (torch, ("empty_like", "full_like", "ones_like", "zeros_like")),
        (Tensor, ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")),
    )
    for name in names
}
"""Operations that read no values of their first operand."""
_AS = {Tensor.expand_as, Tensor.reshape_as, Tensor.type_as, Tensor.view_as}
"""Operations that read no values of their second operand."""


class ChangedInPlaceError(RapidformerError):
    """Scores are needed whose inputs are gone."""

    def __init__(self) -> None:
        super().__init__(
            "attention scores or weights were read after one of their inputs was changed in "
            "place. Read them earlier, or use --without own-attention-code."
        )


@dataclass(eq=False)
class Node:
    """Scores at one moment of their code, what they are, and how that code computes them."""

    form: Form
    shape: Shape
    dtype: torch.dtype
    replay: Callable[[], Tensor] | None
    value: Tensor | None = None
    """The scores themselves, once something has needed them."""
    is_used: bool = False
    """Whether fused attention has used them."""
    base: Node | None = None
    """Scores that these are a view of."""
    is_shared: bool = False
    """Whether other scores are a view of these, or these of others."""

    @property
    def is_computed(self) -> bool:
        """Whether the values are there, and may have been changed since."""
        return self.value is not None or (self.base is not None and self.base.is_computed)

    def compute(self) -> Tensor:
        """The scores as the model's code would have computed them, with their gradient."""
        if self.value is None:
            assert self.replay is not None
            self.value, self.replay = self.replay(), None
        return self.value


class Scores(LateTensor):
    """What a model's code holds; ``node`` is another one after a change in place."""

    meaning = "scores that do not exist (attention in a model's own code)"
    node: Node

    def compute(self) -> Tensor:
        """The scores as they are by now."""
        return self.node.compute()

    @classmethod
    def follow(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Note an operation, or NotImplemented."""
        if func not in _LIKE and func not in _AS:
            return _follow(func, args, kwargs)
        place = 0 if func in _LIKE else 1
        args = tuple(_blank(arg) if n == place else arg for n, arg in enumerate(args))
        result = _follow(func, args, kwargs)
        if result is NotImplemented:
            result = func(*compute_all(args), **compute_all(kwargs))
        return result


def is_lazy(value: Any) -> bool:
    """Whether something is scores that were not computed."""
    return isinstance(value, Scores) and not value.node.is_computed


def compute_all(values: Any, *, but_weights: bool = False) -> Any:
    """Nested containers with plain tensors in place of scores; ``but_weights``: maybe later."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Scores)]
    if all(but_weights and leaf.node.form.is_weights for leaf in leaves):
        return values

    def compute(scores: Scores) -> Tensor:
        is_kept = but_weights and scores.node.form.is_weights
        return scores if is_kept else scores.compute()

    return tree_map_only(Scores, compute, values)


def build(form: Form, shape: Shape, dtype: torch.dtype, replay: Callable[[], Tensor]) -> Scores:
    """Scores for the model's code."""
    return _wrap(Node(form, shape, dtype, replay), form.query)


def replay_later(func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
    """The same operation, later, as it would be now."""
    args, kwargs = tree_map_only(Scores, lambda scores: scores.node, (args, kwargs))
    return later.replay_later(
        func, args, kwargs, device, Node, Node.compute, lambda _: ChangedInPlaceError()
    )


def _wrap(node: Node, like: Tensor) -> Scores:
    # One value, expanded, takes no memory. It is NaN, so that nobody takes it for a score.
    blank = torch.full((), float("nan"), dtype=node.dtype, device=like.device)
    scores: Scores = blank.expand(node.shape).as_subclass(Scores)
    scores.node = node
    return scores


def _write(func: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Tensor:
    """What an operation writes, which is computed in the operands' common type."""
    result: Tensor = func(*args, **kwargs).to(dtype)
    return result


def _blank(value: Any) -> Any:
    """What has the same shape and type, and no values."""
    with without_torch_function(), without_torch_dispatch():
        return value.as_subclass(Tensor) if isinstance(value, Scores) else value


def _follow(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Note an operation, or NotImplemented."""
    plain = IN_PLACE.get(func, func)
    if func is functional.dropout:  # or what unpadding has put there on a CPU
        plain = func = DROPOUT
    rule = FOLLOWED.get(plain)
    lazy = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Scores)]
    if rule is None or not lazy or not is_lazy(lazy[0]) or "out" in kwargs:
        return NotImplemented
    scores = lazy[0]
    if plain is not func and (scores is not args[0] or scores.node.is_shared):
        return NotImplemented

    def read(leaf: Scores) -> Node | Tensor:
        return leaf.node if leaf is scores else leaf.node.compute()  # operands like any tensor

    noted = tree_map_only(Scores, read, args)
    result = rule(plain, *noted, **compute_all(kwargs))
    if result is NotImplemented:
        return NotImplemented
    if result is scores.node:
        return scores
    if not isinstance(result, Node):
        return result
    if plain is not func:
        if result.shape != scores.node.shape or scores.dtype == torch.float16:
            return NotImplemented
        # What is written has the type that was there.
        result.dtype = scores.dtype
        result.replay = replay_later(_write, (plain, result.dtype, *args), kwargs, scores.device)
        scores.node = result
        return scores
    result.replay = replay_later(func, args, kwargs, scores.device)
    return _wrap(result, scores.node.form.query)


WATCHING = convert_function_arguments(Scores, lambda _, scores: scores.compute())
"""Inside, custom autograd functions, which bypass ``__torch_function__``, get computed scores."""
