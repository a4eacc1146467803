"""A padded tensor of which only the real tokens exist: what blocks return without padding.

Operations on each token alone run on the real tokens (``tokenwise.py``). Any other runs with NaN
for padding, so that whoever reads padding gets NaN, and whoever masks or indexes it does not.
Before such a result can do harm (it is back-propagated, meets weights, or Python asks for its
values), it is settled: a result without NaN has not read padding; one with NaN is computed again,
from the same call with padding. Nothing is decided once: it holds for each operation of each step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from rapidformer.accel import later
from rapidformer.accel.later import LateTensor, Noted, StandIn, have_changed, note_version, unpack
from rapidformer.accel.unpad.calls import Call, get_call
from rapidformer.accel.unpad.operations import (
    EFFECTS,
    FOLLOWED,
    FOLLOWED_PAIRS,
    HIDE_NAN,
    SHAPES,
    writes,
)
from rapidformer.accel.unpad.rows import Layout, Rows
from rapidformer.compat.torch_dispatch import convert_function_arguments, tree_leaves, tree_map_only
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.models.watched import is_from_user

_NOT_FOLLOWED = (
    "What the model returns was used by torch.func (vmap, grad) or a compiled extension, which "
    "--dynamic-shape cannot follow. Set --dynamic-shape off."
)


class Unpadded(LateTensor):
    """A tensor computed without padding from what a model's blocks return."""

    meaning = "padding that does not exist (--dynamic-shape)"
    token_layout: Layout
    is_flat: bool
    """Whether rows and columns are one dimension."""
    _calls: tuple[Call, ...]
    _tokens: Tensor | None
    """The real tokens, [1, tokens, ...]; None if this has values of its own, maybe NaN."""
    recompute: Callable[[], Tensor] | None
    """How to get it with padding; None if it is too late for that."""
    _value: Tensor | None
    """The values, with NaN for padding."""
    _copies: list[Noted]
    """What others may write into, and its versions: values, first tokens, what was settled."""
    _writes: int
    """How often something was written into it before."""
    _settled: Tensor | None
    """A plain tensor with the values that it has with padding."""

    @property
    def tokens(self) -> Tensor:
        """The real tokens, which must exist."""
        assert self._tokens is not None
        return self._tokens

    @property
    def lead(self) -> tuple[int, ...]:
        """The dimensions before those of a token."""
        return (self.token_layout.size,) if self.is_flat else self.token_layout.grid

    @property
    def trusts_labels(self) -> bool:
        return all(call.trusts_labels for call in self._calls)

    @property
    def labelled(self) -> int | None:
        """How many of its tokens have a label at most; None if that is not known."""
        return self._calls[0].labelled if len(self._calls) == 1 else None

    @property
    def is_promised(self) -> bool:
        """Whether somebody has promised to read only what predicts labels."""
        return all(call.is_promised for call in self._calls)

    @property
    def is_lazy(self) -> bool:
        """Whether there are only tokens, and nobody has asked for padding or written into it."""
        self.take_writes()
        return self._tokens is not None and not self.is_decided

    @property
    def is_decided(self) -> bool:
        return self._settled is not None or any(call.is_repeated for call in self._calls)

    @property
    def has_value(self) -> bool:
        """Whether NaN can stand for padding: not among whole numbers, nor in filled rows."""
        if self._tokens is None:
            return True
        return self._tokens.is_floating_point() and not self.token_layout.rows.is_filled

    def get_value(self) -> Tensor:
        """The values, with NaN for padding."""
        if self._value is None:
            self._value = self.pad_with(float("nan") if self.tokens.is_floating_point() else 0)
            self._copies.append(note_version(self._value))
        return self._value

    def pad_with(self, number: float) -> Tensor:
        """A plain tensor with this number for padding."""
        return self.token_layout.spread(self.tokens, number).view(self.shape)

    def get_first(self) -> Tensor:
        """The first token of each row, which must be real."""
        rows = self.token_layout.rows
        first = self.tokens[0].index_select(0, rows.ends[: rows.shape[0]].long())
        self._copies.append(note_version(first))
        return first

    def take_writes(self) -> None:
        """Take over what was written into a view, which is one of a copy: ``x[:, 0].zero_()``."""
        written = [noted[0] for noted in self._copies if have_changed([noted])]
        if not written or self.is_decided:
            return
        self._writes, self._copies = self._writes + 1, []
        value, recompute = written[-1], self.recompute
        if value.shape != self.shape:  # the first tokens
            others = self.get_value() if self.has_value else settle(self)
            value = torch.cat([value[:, None], others[:, 1:]], 1)
        if self.is_decided:
            self._settled = value
            return
        self._tokens, self._value, self._copies = None, value, [note_version(value)]
        if recompute is not None:
            self.recompute = lambda: torch.where(value.isnan(), recompute(), value)

    def count_writes(self) -> int:
        """How often something was written into it so far, as far as that can be seen."""
        return self._writes + sum(note_version(copy)[1] - version for copy, version in self._copies)

    def get_padded(self) -> Tensor:
        """The values with padding."""
        if self._settled is None:
            assert self.recompute is not None
            self._settled = self.recompute()
            self._copies.append(note_version(self._settled))
        return self._settled

    def derive(
        self,
        tokens: Tensor,
        recompute: Callable[[], Tensor],
        *,
        layout: Layout | None = None,
        is_flat: bool | None = None,
    ) -> Tensor:
        """A tensor with these tokens, which comes from this one."""
        if tokens is self._tokens and layout is None and is_flat is None:
            return self
        is_flat = self.is_flat if is_flat is None else is_flat
        return _build(self._calls, layout or self.token_layout, recompute, tokens, is_flat=is_flat)

    def replay_later(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Callable[[], Any]:
        """The same operation, later, on what its arguments are with padding."""
        return later.replay_later(
            func, args, kwargs, self.device, Unpadded, Unpadded.get_padded, _say_changed
        )

    @classmethod
    def follow(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run on the real tokens, or else with NaN for padding; NotImplemented if neither can."""
        if func in SHAPES:
            meta = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
            return func(meta, *args[1:], **kwargs)
        leaves = tree_leaves((args, kwargs))
        operands = [leaf for leaf in leaves if isinstance(leaf, cls)]
        are_lazy = [operand.is_lazy for operand in operands]
        if func is Tensor.register_hook and are_lazy[0] and not is_from_user(args[1]):
            return operands[0].tokens.register_hook(args[1])
        follow = FOLLOWED_PAIRS.get(func)
        if follow is None and args and isinstance(args[0], cls):
            follow = FOLLOWED.get(func)
        is_alone = "other" not in kwargs and not writes(func, kwargs)
        if follow is not None and is_alone and all(are_lazy):
            result = follow(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return _run_on_values(func, args, kwargs, operands, leaves)

    def compute(self) -> Tensor:
        """A plain tensor with the values that it would have with padding."""
        self.take_writes()
        if self._settled is not None:
            return self._settled
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            # A CUDA graph can neither look at values nor branch on them.
            raise RapidformerError("its loss may read padding, which only the host could find out")
        if self._tokens is None and not self.is_decided and not _has_nan(self.get_value()):
            self._settled = self.get_value()
            return self._settled
        is_late = any(call.is_late for call in self._calls)
        padded = self.get_value() if is_late else self.get_padded()
        # A loss that is NaN with padding, too, is bad by itself.
        if is_late or not _has_nan(padded):
            for call in self._calls:
                call.blame()
        return padded


def settle(tensor: Any) -> Any:
    """A plain tensor in place of one that lacks padding; anything else as it is."""
    return tensor.compute() if isinstance(tensor, Unpadded) else tensor


def settle_all(values: Any) -> Any:
    """The same for all tensors in nested containers."""
    return tree_map_only(Unpadded, settle, values)


def start(tokens: Tensor, rows: Rows, block: nn.Module) -> Tensor:
    """A block's output in the shape that it has with padding."""
    call = get_call()
    is_full = len(rows.places) == rows.shape[0] * rows.shape[1] and not rows.is_filled
    if call is None or is_full:  # packed examples have no padding
        return rows.unpack(tokens)
    call.removal.has_packed = True
    recompute = functools.partial(call.find_padded, block)
    return _build((call,), Layout.of_rows(rows), recompute, tokens)


def lacks_padding(tensor: Any) -> TypeGuard[Unpadded]:
    """Whether only the real tokens of a tensor exist."""
    return isinstance(tensor, Unpadded) and tensor.is_lazy


def put_zeros(tensor: Any) -> Any:
    """A plain tensor with zeros for padding that nobody is going to read."""
    return tensor.pad_with(0.0) if lacks_padding(tensor) else settle(tensor)


def map_tokens(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function that treats each token alone, and that torch's dispatch does not see."""
    if lacks_padding(tensor):
        return tensor.derive(function(tensor.tokens), lambda: function(tensor.get_padded()))
    return function(settle(tensor))


def _say_changed(func: Any) -> ConfigurationError:
    return ConfigurationError(
        f"{func.__name__}() has read what the model returns for padding, and its other arguments "
        "were changed in place since. Leave padding out, or set --dynamic-shape off."
    )


def _run_on_values(
    func: Any, args: Any, kwargs: dict[str, Any], operands: list[Unpadded], leaves: list[Any]
) -> Any:
    """Run with NaN for padding, if that can be taken back; otherwise NotImplemented."""
    if any(operand.is_decided or not operand.has_value for operand in operands):
        return NotImplemented
    if func in EFFECTS or func in HIDE_NAN or writes(func, kwargs):
        return NotImplemented
    # The gradient of weights that meet NaN would be NaN even where the loss masks it.
    others = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, Unpadded)]
    if torch.is_grad_enabled() and any(other.requires_grad for other in others):
        return NotImplemented
    values = tree_map_only(Unpadded, Unpadded.get_value, (args, kwargs))
    try:
        with torch.autograd.graph.saved_tensors_hooks(note_version, _without_nan):
            result = func(*values[0], **values[1])
    except RuntimeError:  # it may refuse NaN, and say what is wrong otherwise when it runs again
        return NotImplemented
    calls = tuple({id(call): call for operand in operands for call in operand._calls}.values())
    keep = functools.partial(_build, calls, operands[0].token_layout)
    replay = operands[0].replay_later(func, args, kwargs)
    if isinstance(result, Tensor) and result.is_floating_point():
        return keep(replay, value=result)
    is_split = type(result) in (tuple, list) and len(result) > 0
    if is_split and all(isinstance(r, Tensor) and r.is_floating_point() for r in result):
        replay = functools.cache(replay)
        return type(result)([keep(pick(replay, n), value=r) for n, r in enumerate(result)])
    # What is not a floating-point number would not show that it comes from padding.
    return NotImplemented


def _without_nan(noted: Noted) -> Tensor:
    """What the backward pass reads for padding: not NaN, and a number that log and acos take."""
    saved = unpack(noted)
    return torch.where(saved.isnan(), 0.5, saved) if saved.is_floating_point() else saved


def pick(replay: Callable[[], Any], number: int) -> Callable[[], Any]:
    """One of the results that an operation has."""
    return lambda: replay()[number]


def _build(
    calls: tuple[Call, ...],
    layout: Layout,
    recompute: Callable[[], Tensor],
    tokens: Tensor | None = None,
    *,
    value: Tensor | None = None,
    is_flat: bool = False,
) -> Tensor:
    """A tensor that has these tokens, or these values, which may be NaN because of padding."""
    shell = value
    if tokens is not None:
        lead = (layout.size,) if is_flat else layout.grid
        shell = StandIn.apply(tokens, (*lead, *tokens.shape[2:]), tokens.dtype, _NOT_FOLLOWED)
    assert shell is not None
    built: Any = shell.as_subclass(Unpadded)
    built.token_layout, built.is_flat, built._calls = layout, is_flat, calls
    built._tokens, built._value, built._settled, built.recompute = tokens, value, None, recompute
    built._writes, built._copies = 0, [] if value is None else [note_version(value)]
    for call in calls:
        call.tensors.append(weakref.ref(built))
    return built


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.detach().isnan().any())


WATCHING = convert_function_arguments(Unpadded, lambda _, tensor: settle(tensor))
"""Inside, what bypasses ``__torch_function__`` is seen: custom autograd functions."""
