"""A model as it may become: other weights than the first ones, and training without chance.

A gate that starts at zero hides what it lets through later, and so does a constant of 1e-6. So for
a trial, such weights get other values; afterwards every bit is as before. Training draws random
numbers, which no two passes share. So each draw is replaced by one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.dropout_seeds import DROPOUTS
from rapidformer.accel.split.absent import AbsentWeight
from rapidformer.compat.torch_dispatch import TorchDispatchMode
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
_ALL_KEPT = 0x7FFF7FFF7FFF7FFF
"""Random bits by which ``dropout.py`` keeps all four elements."""


@contextmanager
def stir(model: nn.Module) -> Iterator[None]:
    """Inside, no weight of a model hides what it is multiplied by."""
    generator = torch.Generator().manual_seed(0)  # the same on ranks that share a weight
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for weight in _list_hiding(model):
                kept.append((weight, weight.clone()))
                weight.copy_(_draw(weight, generator))
        yield
    finally:
        with torch.no_grad():
            for weight, values in reversed(kept):
                weight.copy_(values)


def _list_hiding(model: nn.Module) -> list[Tensor]:
    """Weights that are tiny; in modules of the user's own, constants too: sigmoid(-10) is tiny."""
    weights: dict[int, tuple[Tensor, bool]] = {}
    for module in model.modules():
        is_own = not _is_library(get_own_class(module))
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


def _is_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("torch", "transformers", "peft", "rapidformer")


def _has_values(weight: Tensor) -> bool:
    is_known = weight.dtype in FLOATS and not isinstance(weight, AbsentWeight)
    return is_known and not weight.is_meta and weight.numel() > 0


def _draw(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Other values for a weight; constants other than zero keep their sign."""
    if weight.dim() > 1:
        return torch.randn(weight.shape, generator=generator) * _OF_MATRICES
    sizes = torch.rand(weight.shape, generator=generator) + 0.5
    signs = torch.rand(weight.shape, generator=generator).sub(0.5).sign()
    first = float(weight.flatten()[0])
    return sizes * (signs / 2 if abs(first) < _TINY else torch.tensor(first).sign())


@contextmanager
def keep_state(model: nn.Module) -> Iterator[None]:
    """Afterwards, all that forward passes have changed in modules is as before, such as counts."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if not buffer.is_meta
    ]
    numbers = [(module, _list_numbers(module)) for module in model.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in buffers:
                if getattr(module, name, None) is not buffer:
                    setattr(module, name, buffer)
                if not torch.equal(buffer, values):
                    buffer.copy_(values)
        for module, before in numbers:
            for name, value in before.items():
                if vars(module).get(name) is not value:
                    setattr(module, name, value)


def _list_numbers(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float)) and name != "training"
    }


class Steady(TorchDispatchMode):
    """Inside, dropout keeps everything, and other random numbers are always the same.

    With the shape of a padded batch, it raises what draws a number for each row: without padding,
    there is a single row.
    """

    def __init__(self, model: nn.Module, shape: Sequence[int] = (1, 1)) -> None:
        super().__init__()
        self._model, (self._rows, self._columns) = model, shape
        self._rates: list[tuple[Any, str, float]] = []

    def __enter__(self) -> Steady:
        # Attention would draw in its kernels.
        for module in filter(_is_from_library, self._model.modules()):
            for name, value in vars(module).items():
                is_rate = name == "p" if isinstance(module, DROPOUTS) else "dropout" in name
                if is_rate and isinstance(value, float):
                    self._rates.append((module, name, value))
        for module, name, _ in self._rates:
            setattr(module, name, 0.0)
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        for module, name, value in self._rates:
            setattr(module, name, value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        name = func.overloadpacket.__name__.rstrip("_").removesuffix("_like")
        drawn = result[0] if isinstance(result, tuple) else result
        if "attention" not in name and self._rows > 1:
            sizes = tuple(drawn.shape)
            if self._rows in sizes and self._columns not in sizes:
                raise ModelError("it draws random numbers for each row")
        settle = _SETTLED.get(name)
        return result if settle is None else settle(result, *args)


def _is_from_library(module: nn.Module) -> bool:
    """Whether it is a torch dropout, or (derived from) a module of transformers or an adapter."""
    if isinstance(module, DROPOUTS):
        return get_own_class(module) in DROPOUTS
    classes = (cls for cls in type(module).__mro__ if cls not in nn.Module.__mro__)
    return any(map(_is_library, classes))


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
