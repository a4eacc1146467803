"""Follow the passes of a model that has no values: what is alive when, and what is computed.

Weights and activations are on torch's ``meta`` device; ids, masks and labels keep their values on
the CPU, so that code that looks at them runs as it would. What a GPU does differently from the meta
device is said here: the types of autocast, fused attention, dropout that keeps a mask of bytes.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from rapidformer.compat.patches import Entry, Patch
from rapidformer.compat.torch_dispatch import (
    ATTENTION_PASSES,
    READ_VALUE,
    TorchDispatchMode,
    attend,
    attend_with_bias,
    get_packet,
    get_schema,
    tree_map_only,
)
from rapidformer.models.recording import list_tensors

_INDEX = torch.ops.aten.index.Tensor
_ROUNDING = 512
_LOW = frozenset({
    "linear", "matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "addmm", "addbmm", "mm",
    "mv", "einsum", "conv1d", "conv2d", "conv3d", "prelu", "multi_head_attention_forward",
    "_grouped_mm", "grouped_mm",
})  # fmt: skip
_HIGH = frozenset({
    "softmax", "log_softmax", "layer_norm", "group_norm", "exp", "log", "pow", "__pow__",
    "__rpow__", "prod", "sum", "cumsum", "cumprod", "norm", "rsqrt", "reciprocal", "erfinv",
    "nll_loss", "cross_entropy", "cross_entropy_loss", "mse_loss", "l1_loss", "smooth_l1_loss",
    "cosine_similarity", "kl_div", "binary_cross_entropy_with_logits", "ctc_loss", "softplus",
    "log10", "log2", "log1p", "expm1", "cosh", "sinh", "tan", "acos", "asin", "cdist", "rms_norm",
})  # fmt: skip


_precision: ContextVar[torch.dtype | None] = ContextVar("precision", default=None)
"""What autocast computes in here and now; None where it is off."""


@contextmanager
def _computing_in(dtype: torch.dtype | None) -> Iterator[None]:
    token = _precision.set(dtype)
    try:
        yield
    finally:
        _precision.reset(token)


def _build_autocast(original: Any) -> Any:
    def autocast(
        device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        if device_type != "meta":
            return original(device_type, dtype, enabled, *args, **kwargs)
        return _computing_in(dtype or _precision.get() if enabled else None)

    return autocast


def _build_question(answer: Callable[[], Any]) -> Callable[[Any], Any]:
    def build(original: Any) -> Any:
        return lambda *kind: answer() if kind == ("meta",) else original(*kind)

    return build


_REGIONS = Patch(
    lambda: [
        Entry(torch, "autocast", _build_autocast),
        Entry(torch, "is_autocast_enabled", _build_question(lambda: _precision.get() is not None)),
        Entry(torch, "get_autocast_dtype", _build_question(_precision.get)),
    ]
)
"""Inside, a model may ask for and change autocast on the meta device, which torch refuses."""


@dataclass
class Segment:
    """A stretch of a pass: one block, or what stands outside of the blocks."""

    peak: int = 0
    """The most that was alive in it beside what was alive when it began."""
    inputs: int = 0
    """The hidden states that it got."""
    saved: int = 0
    """What it has made that is alive at the end of the forward pass."""
    split: int = 0
    casts: int = 0
    """Of that: what tensor parallelism splits, copies of weights in 16 bits."""
    products: int = 0
    """Results of matrix products and attention, alive or not."""
    matrix_flops: float = 0.0
    attention_flops: float = 0.0
    moved: int = 0
    operations: int = 0


class GpuTypes(TorchFunctionMode):
    """The functions of torch as a GPU would run them, in the run's precision."""

    def __init__(
        self,
        dtype: torch.dtype | None,
        note_cast: Callable[[Tensor], None],
        *,
        keeps_masks: bool = True,
    ) -> None:
        """``keeps_masks``: dropout's; compiled blocks draw them again in the backward pass."""
        super().__init__()
        self._dtype, self._note_cast, self._keeps_masks = dtype, note_cast, keeps_masks
        self._casts: dict[int, Tensor] = {}

    def __enter__(self) -> Any:
        self._inside = ExitStack()
        self._inside.enter_context(_REGIONS)
        self._inside.enter_context(_computing_in(self._dtype))
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._inside.close()
        return super().__exit__(*error)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "scaled_dot_product_attention":
            return self._attend(*args, **kwargs)
        if name == "dropout":
            return self._drop(*args, **kwargs)
        if (low := _precision.get()) is not None:
            if name in _LOW:
                args, kwargs = self._cast((args, kwargs), torch.float32, low)
            elif name in _HIGH:
                args, kwargs = self._cast((args, kwargs), low, torch.float32)
        return function(*args, **kwargs)

    def _drop(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return input
        return torch.native_dropout(input, p, True)[0] if self._keeps_masks else input * (1 - p)

    def _cast(self, values: Any, source: torch.dtype, target: torch.dtype) -> Any:
        def cast(tensor: Tensor) -> Tensor:
            if tensor.dtype is not source or not tensor.is_meta:
                return tensor
            if not (tensor.is_leaf and isinstance(tensor, nn.Parameter)):
                return tensor.to(target)
            if not tensor.requires_grad:  # autocast keeps copies of trained weights only
                copied = tensor.to(target)
                self._note_cast(copied)
                return copied
            if id(tensor) not in self._casts:
                self._casts[id(tensor)] = tensor.to(target)
                self._note_cast(self._casts[id(tensor)])
            return self._casts[id(tensor)]

        return tree_map_only(Tensor, cast, values)

    def end_call(self) -> None:
        """Autocast forgets its copies of weights when the model's call ends."""
        self._casts.clear()

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if (low := _precision.get()) is not None:
            query, key, value = self._cast((query, key, value), torch.float32, low)
        options: Any = {} if scale is None else {"scale": scale}
        if attn_mask is None and query.dtype is not torch.float32:
            return attend(query, key, value, dropout_p, is_causal, **options)
        if enable_gqa or key.shape[1] != query.shape[1]:
            repeats = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
        if attn_mask is not None:
            if attn_mask.dtype is torch.bool:
                attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype, device="meta")
            attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        return attend_with_bias(query, key, value, attn_mask, dropout_p, is_causal, **options)


class Tracing(TorchDispatchMode):
    """Count what is alive, and the work of every operation, by segment."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: dict[str, Segment] = defaultdict(Segment)
        self._alive = 0
        self._sizes: dict[int, tuple[Any, int]] = {}
        self._split: set[int] = set()
        self._casts: set[int] = set()
        self._born: dict[int, str] = {}
        self.name, self._started = "outside", 0

    def enter(self, name: str) -> None:
        """From here on, everything belongs to this segment."""
        self.name, self._started = name, self._alive

    def leave(self, name: str, following: str) -> None:
        """The same, if this segment is the current one."""
        if self.name == name:
            self.enter(following)

    def end_forward(self) -> None:
        """What is alive now is kept for the backward pass."""
        for key, name in self._born.items():
            segment, size = self.segments[name], self._sizes[key][1]
            segment.saved += size
            segment.casts += size * (key in self._casts)
            segment.split += size * (key in self._split and key not in self._casts)

    def note_cast(self, tensor: Tensor) -> None:
        self._casts.add(id(tensor.untyped_storage()))

    def set_split(self, tensors: Any, *, is_split: bool) -> None:
        """Whether tensor parallelism leaves each rank a part of these."""
        for tensor in list_tensors(tensors):
            key = id(tensor.untyped_storage())
            (self._split.add if is_split else self._split.discard)(key)

    def forget(self, tensor: Tensor) -> None:
        """Not an activation: the gradient of a weight."""
        self._remove(id(tensor.untyped_storage()))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        outputs = _run(function, args, kwargs)
        self._count(function, args, kwargs, outputs)
        return outputs

    def _count(self, function: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        given, made = list_tensors((args, kwargs)), list_tensors(outputs)
        segment = self.segments[self.name]
        known = {id(t.untyped_storage()) for t in given}
        is_split = bool(known & self._split)
        fresh = 0
        for tensor in made:
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in known or key in self._sizes:
                continue
            fresh += self._add(storage, key)
            if is_split:
                self._split.add(key)
        packet = get_packet(function)
        if packet in ATTENTION_PASSES:
            parts = _share_heads(args)
            segment.attention_flops += flop_registry[packet](*parts, **kwargs, out_val=outputs)
            segment.products += fresh
        elif packet in flop_registry:
            segment.matrix_flops += flop_registry[packet](*args, **kwargs, out_val=outputs)
            segment.products += fresh
        elif fresh or get_schema(function).is_mutable:
            segment.moved += sum(_measure(t) for t in (*given, *made))
        segment.operations += bool(fresh)
        segment.peak = max(segment.peak, self._alive - self._started)

    def _add(self, storage: Any, key: int) -> int:
        size: int = -(-storage.nbytes() // _ROUNDING) * _ROUNDING
        self._sizes[key] = (weakref.ref(storage, lambda _: self._remove(key)), size)
        self._born[key] = self.name
        self._alive += size
        return size

    def _remove(self, key: int) -> None:
        entry = self._sizes.pop(key, None)
        if entry is not None:
            self._alive -= entry[1]
            self._born.pop(key, None)
            self._split.discard(key)
            self._casts.discard(key)


def _run(function: Any, args: Any, kwargs: Any) -> Any:
    """On the meta device if anything is there; what the host knows is computed there."""
    tensors = list_tensors((args, kwargs))
    if not any(t.is_meta for t in tensors):
        return function(*args, **kwargs)
    if function is READ_VALUE:
        return 1.0 if tensors[0].is_floating_point() else 1
    if function is _INDEX:
        args = (args[0], [place for index in args[1] for place in _list_places(index)])
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": "meta"}  # a copy to the host has no values either
    args, kwargs = tree_map_only(
        Tensor, lambda t: t if t.is_meta or t.dim() == 0 else t.to("meta"), (args, kwargs)
    )
    return function(*args, **kwargs)


def _list_places(index: Tensor | None) -> list[Tensor | None]:
    """A mask whose values are known, as places."""
    if index is None or index.is_meta or index.dtype is not torch.bool:
        return [index]
    return list(index.nonzero(as_tuple=True))


def _share_heads(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of attention, each query's head with keys of its own: torch 2.11 counts only so."""
    # A backward pass takes a gradient first.
    parts = [part for part in args[:4] if isinstance(part, Tensor) and part.dim() == 4]
    heads = max(part.shape[1] for part in parts)

    def share(part: Any) -> Any:
        is_shared = any(part is each for each in parts) and part.shape[1] < heads
        return part[:, :1].expand(-1, heads, -1, -1) if is_shared else part

    return tuple(map(share, args))


def _measure(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
