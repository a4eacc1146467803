"""Other weights than the first ones, and training without chance or rounding, for a trial.

A gate that starts at zero hides what it lets through later, and so does a constant of 1e-6. So for
a trial, such weights get other values; afterwards every bit is as before. Training draws random
numbers, which no two passes share. So each draw is replaced by one number.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode

from rapidformer.accel.dropout_seeds import DROPOUTS
from rapidformer.accel.split.absent import AbsentWeight
from rapidformer.compat.patches import Entry, Patch
from rapidformer.compat.torch_dispatch import TorchDispatchMode
from rapidformer.compat.torch_tensors import count_changes
from rapidformer.dist.whole import get_shard
from rapidformer.errors import ModelError
from rapidformer.overlay import get_own_class

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What weights that can be trained consist of."""
_TINY, _HUGE = 0.01, 100.0
"""Constants above are no gates: -1e9 masks scores."""
_SAMPLE = 1024
_OF_MATRICES = 0.05
"""The standard deviation of a matrix: more than most start with."""
_MOST_IN_FLOAT64 = 2**30
_ALL_KEPT = 0x7FFF7FFF7FFF7FFF
"""Random bits by which ``dropout.py`` keeps all four elements."""


@contextmanager
def stir(model: nn.Module) -> Iterator[None]:
    """Inside, no weight of a model hides what it is multiplied by."""
    generator = torch.Generator().manual_seed(0)  # the same on ranks that share a weight
    with ExitStack() as restoring:  # all of them, whatever fails
        for weight in _list_hiding(model):
            restoring.callback(_write, weight, weight.clone())
            _write(weight, _draw(weight, generator))
        yield


@torch.no_grad()
def _write(weight: Tensor, values: Tensor) -> None:
    weight.data.copy_(values)  # not seen by autograd, which may have saved it in the user's step


def _list_hiding(model: nn.Module) -> list[Tensor]:
    """Weights that are tiny; in modules of the user's own, constants too: sigmoid(-10) is tiny."""
    weights: dict[int, tuple[Tensor, bool]] = {}
    for module in model.modules():
        is_own = not is_library(get_own_class(module))
        buffers = module.named_buffers(recurse=False) if is_own else ()  # a gate may be one
        for name, weight in (*module.named_parameters(recurse=False), *buffers):
            # A bias of a library's module is a summand: zero hides nothing.
            if _has_values(weight) and (is_own or name != "bias"):
                weights[id(weight)] = get_shard(weight.detach()), is_own
    chosen = list(weights.values())
    for size in (_SAMPLE, None):  # the first numbers of most show that they are neither
        if not chosen:
            break
        parts = [weight.flatten()[:size].float() for weight, _ in chosen]
        bounds = torch.stack([torch.stack(part.aminmax()) for part in parts]).tolist()
        chosen = [
            each
            for each, (least, most) in zip(chosen, bounds, strict=True)
            if max(-least, most) < _TINY or (each[1] and least == most and abs(most) < _HUGE)
        ]
    return [weight for weight, _ in chosen]


def is_library(cls: type) -> bool:
    """Whether a class is not the user's own: its training differs from evaluation by chance."""
    return cls.__module__.partition(".")[0] in ("torch", "transformers", "peft", "rapidformer")


def _has_values(weight: Tensor) -> bool:
    return weight.dtype in FLOATS and weight.numel() > 0 and _is_writable(weight)


def _is_writable(tensor: Tensor) -> bool:
    """Whether a tensor has numbers of its own; those of an expanded one share memory."""
    if tensor.is_meta or isinstance(tensor, AbsentWeight):
        return False
    sizes = zip(get_shard(tensor.detach()).stride(), tensor.shape, strict=True)
    return all(stride > 0 or size == 1 for stride, size in sizes)


def _draw(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Other values for a weight; constants other than zero keep their sign."""
    if weight.dim() > 1:
        return torch.randn(weight.shape, generator=generator, device="cpu") * _OF_MATRICES
    sizes = torch.rand(weight.shape, generator=generator, device="cpu") + 0.5
    signs = torch.rand(weight.shape, generator=generator, device="cpu").sub(0.5).sign()
    first = float(weight.flatten()[0])
    return sizes * (signs / 2 if abs(first) < _TINY else math.copysign(1.0, first))


def _smooth(relu: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(relu)
    def smooth(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return functional.silu(input) if SMOOTH.is_inside() else relu(input, *args, **kwargs)

    return smooth


SMOOTH = Patch(lambda: [Entry(place, "relu", _smooth) for place in (functional, torch)])
"""Inside, ReLU has no kink: there, rounding alone decides whether a number has all of its gradient
or nothing. Number by number, ReLU mixes tokens no more than what takes its place.
"""


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Inside, a model computes in fp64, also where its code asks for fp32."""
    tensors = [*model.parameters(), *model.buffers()]
    before = [(tensor, tensor.data) for tensor in tensors if tensor.is_floating_point()]
    try:
        for tensor, data in before:
            tensor.data = data.double()
        with _Float64():
            yield
    finally:
        for tensor, data in before:
            tensor.data = data


def may_use_float64(model: nn.Module) -> bool:
    """Whether all weights are plain, and their copies and gradients fit beside everything else."""
    weights = list(model.parameters())
    is_plain = all(type(weight.data) is Tensor for weight in weights)
    return is_plain and sum(weight.numel() for weight in weights) <= _MOST_IN_FLOAT64


class _Float64(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        elif func == Tensor.dtype.__get__:  # type: ignore[attr-defined]
            dtype = func(*args)
            # A model's code must do what it does in fp32; kernels must know what they get.
            return torch.float32 if dtype is torch.float64 and _is_asked_by_model() else dtype
        given = {name: _raise_precision(value) for name, value in (kwargs or {}).items()}
        return func(*map(_raise_precision, args), **given)


def _is_asked_by_model() -> bool:
    """Whether the function that asks torch for something is not torch's, Triton's or ours."""
    frame = getattr(inspect.currentframe(), "f_back", None)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back  # ours, or of another mode, which passes it on
    asking = "" if frame is None else frame.f_globals.get("__name__", "").partition(".")[0]
    return asking not in ("torch", "triton", "rapidformer")


def _raise_precision(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def keep_state(model: nn.Module) -> Iterator[None]:
    """Afterwards, all that forward passes have changed in modules is as before, such as counts."""
    with ExitStack() as restoring:
        for module in model.modules():
            for tensor in _list_kept(module):
                if _is_writable(tensor):
                    restoring.callback(_restore_values, tensor, tensor.clone())
            # Its parts as well: BigBird's layers get another attention for short rows.
            tables = [value for value in vars(module).values() if type(value) is dict]
            for table in (vars(module), *tables):
                restoring.callback(_restore_table, table, dict(table))
            if not is_library(get_own_class(module)):
                lists = [value for value in vars(module).values() if type(value) in (list, set)]
                for held in lists:
                    restoring.callback(_restore_items, held, held.copy())
        yield


def _list_kept(module: nn.Module) -> list[Tensor]:
    """What a forward pass may change: of frozen weights (moving averages), those of own code."""
    is_own = not is_library(get_own_class(module))
    frozen = [p for p in module.parameters(recurse=False) if is_own and not p.requires_grad]
    return [*module.buffers(recurse=False), *frozen]


def list_statistics(blocks: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """What modules keep of the numbers that they see, as quantization's observers do, by versions.

    Parametrizations see weights only, not tokens. Inside ``keep_state``, ids are not used again.
    """
    modules = [module for block in blocks for module in block.modules()]
    lists = [module for module in modules if isinstance(module, ParametrizationList)]
    of_weights = {id(module) for each in lists for module in each.modules()}
    kept = (t for module in modules if id(module) not in of_weights for t in _list_kept(module))
    return [(id(tensor), count_changes(tensor)) for tensor in kept if tensor.dtype in FLOATS]


@torch.no_grad()
def _restore_values(tensor: Tensor, values: Tensor) -> None:
    if not torch.equal(tensor, values):
        tensor.copy_(values)


def _restore_items(held: Any, before: Any) -> None:
    held.clear()
    (held.extend if isinstance(held, list) else held.update)(before)


def _restore_table(table: dict[str, Any], before: dict[str, Any]) -> None:
    if table.keys() != before.keys() or any(map(operator.is_not, table.values(), before.values())):
        table.clear()
        table.update(before)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, no module of a library drops anything, nor lets attention do so in its kernels."""
    rates = [
        (module, name, value)
        for module in filter(_is_from_library, model.modules())
        for name, value in vars(module).items()
        if isinstance(value, float)
        and (name == "p" if isinstance(module, DROPOUTS) else "dropout" in name)
    ]
    try:
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, value in rates:
            setattr(module, name, value)


class Steady(TorchDispatchMode):
    """Inside, dropout keeps everything, and the usual draws of random numbers are one number.

    With the shape of a padded batch, it raises what draws a number for each row: without padding,
    there is a single row. The same goes for an extreme over tokens in ``own``, modules of the
    user's code: whether padding is one depends on the batch.
    """

    def __init__(
        self, model: nn.Module, shape: Sequence[int] = (1, 1), own: Sequence[nn.Module] = ()
    ) -> None:
        super().__init__()
        self._model, (self._rows, self._columns), self._own = model, shape, own
        self._changes = ExitStack()
        self._depth = 0

    def __enter__(self) -> Steady:
        self._changes.enter_context(without_dropout(self._model))
        for module in self._own:
            self._changes.callback(module.register_forward_pre_hook(self._go_in).remove)
            hook = module.register_forward_hook(self._come_out, always_call=True)
            self._changes.callback(hook.remove)
        super().__enter__()
        return self

    def _go_in(self, *_: Any) -> None:
        self._depth += 1

    def _come_out(self, *_: Any) -> None:
        self._depth -= 1

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self._changes.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_").removesuffix("_like")
        if self._depth and name in _EXTREMES and self._is_over_tokens(name, args, kwargs or {}):
            raise ModelError("its blocks take an extreme over tokens")
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        drawn = result[0] if isinstance(result, tuple) else result
        if "attention" not in name and self._rows > 1:
            sizes = tuple(drawn.shape)
            if self._rows in sizes and self._columns not in sizes:
                raise ModelError("it draws random numbers for each row")
        settle = _SETTLED.get(name)
        return result if settle is None else settle(result, *args)

    def _is_over_tokens(self, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether an extreme is one of numbers of several tokens."""
        given, (place, default) = args[0], _EXTREMES[name]
        dims = kwargs.get("dim", args[place] if len(args) > place else default)
        if isinstance(dims, Tensor) or not given.dim() or not given.is_floating_point():
            return False  # of two tensors, number by number
        reduced = [dims] if isinstance(dims, int) else dims or range(given.dim())
        shape, of_tokens = tuple(given.shape), set[int]()
        if shape[:2] == (self._rows, self._columns):
            of_tokens = {0, 1}
        elif shape[0] == self._rows * self._columns:
            of_tokens = {0}
        return any(dim % given.dim() in of_tokens for dim in reduced)


def _is_from_library(module: nn.Module) -> bool:
    """Whether it is a torch dropout, or (derived from) a module of transformers or an adapter."""
    if isinstance(module, DROPOUTS):
        return get_own_class(module) in DROPOUTS
    classes = (cls for cls in type(module).__mro__ if cls not in nn.Module.__mro__)
    return any(map(is_library, classes))


def _drop_nothing(result: tuple[Tensor, Tensor], given: Tensor, rate: float, *_: Any) -> Any:
    kept, mask = result
    return kept.copy_(given).div_(1 - rate), mask.fill_(True)


def _use_middle(drawn: Tensor, _: Any, least: float = 0.0, most: float = 1.0) -> Tensor:
    return drawn.fill_((least + most) / 2)


def _use_mean(drawn: Tensor, _: Any, mean: float = 0.0, *__: Any) -> Tensor:
    return drawn.fill_(mean)


def _use_bits(drawn: Tensor, *bounds: Any) -> Tensor:
    is_whole = drawn.dtype == torch.int64 and bounds[-1] is None
    return drawn.fill_(_ALL_KEPT) if is_whole else drawn.zero_()


_SETTLED: dict[str, Callable[..., Any]] = {
    "native_dropout": _drop_nothing, "bernoulli": lambda drawn, *_: drawn.fill_(1),
    "uniform": _use_middle, "rand": lambda drawn, *_: drawn.fill_(0.5), "normal": _use_mean,
    "randn": lambda drawn, *_: drawn.zero_(), "exponential": lambda drawn, *_: drawn.fill_(1),
    "random": _use_bits, "randint": lambda drawn, *_: drawn.zero_(),
}  # fmt: skip
"""By its name, what a draw of random numbers gives: of dropout, that all is kept."""

_EXTREMES: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("max", "min", "amax", "amin", "aminmax", "argmax", "argmin"), (1, None)),
    "median": (1, None), "sort": (1, -1), "topk": (2, -1), "kthvalue": (2, -1),
}  # fmt: skip
"""Where an operation that picks numbers by their size has its dimensions, and which by default."""
