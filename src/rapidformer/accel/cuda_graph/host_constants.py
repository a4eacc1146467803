"""What a model computes on the host from constants alone, such as relative positions.

Copying it to the device in every step would make the step wait, and no graph can hold such a copy.
So each value is copied once, and a graph reads the copy. Whatever else the host computes
with is not a constant: a tensor that the model keeps, numbers drawn, values of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rapidformer.compat.torch_dispatch import get_function_mode, tree_leaves

_FACTORIES: set[Callable[..., Any]] = {
    torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.tensor, torch.zeros,
}  # fmt: skip
_MOVES: set[Callable[..., Any]] = {Tensor.to, Tensor.cuda, Tensor.type_as}
_MOST_BYTES = 2**26
"""Of all copies; what comes later is copied in every step, or prevents the graph."""


class HostConstants(TorchFunctionMode):
    """Inside, a constant of the host is copied to this device only once."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._constants: dict[int, Tensor] = {}
        """By the address of their memory, which is not used again while they are here."""
        self._copies: dict[Hashable, Tensor] = {}
        self._num_bytes = 0

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._constants.clear()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        is_made_here = func is torch.tensor and self._is_here(options.get("device"))
        if is_made_here and not options.get("requires_grad"):
            return self._build(args, options)
        if func in _MOVES and self._is_constant(args[0]):
            copy = self._move(args[0], *args[1:], *options.values(), is_named=func is Tensor.cuda)
            if copy is not None:
                return copy
        result = func(*args, **options)
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        if all(map(self._is_constant, tensors)) if tensors else func in _FACTORIES:
            self._note(tree_leaves(result))
        elif "out" in options or _writes(func):
            for tensor in tensors:
                self._constants.pop(_get_address(tensor), None)
        return result

    def _build(self, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        """``torch.tensor(data, device=...)``, which would wait."""
        on_host = torch.tensor(*args, **{**options, "device": "cpu"})
        has_tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves(args))
        copy = None if has_tensors else self._copy(on_host)
        return torch.tensor(*args, **options) if copy is None else copy

    def _move(self, constant: Tensor, *options: Any, is_named: bool) -> Tensor | None:
        """``constant.to(...)`` or similar; None if it does not go to this device."""
        device, dtype = self._device if is_named else None, constant.dtype
        for option in options:
            if isinstance(option, torch.memory_format):
                return None
            if isinstance(option, Tensor):
                device, dtype = option.device, option.dtype
            elif isinstance(option, torch.dtype):
                dtype = option
            elif option is not None and not isinstance(option, bool):
                device = torch.device(option)
        return self._copy(constant.to(dtype)) if self._is_here(device) else None

    def _copy(self, constant: Tensor) -> Tensor | None:
        """A copy on the device, which the caller may change; None if there is none to be had."""
        content = constant.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        key = (constant.dtype, constant.shape, constant.stride(), content)
        copy = self._copies.get(key)
        if copy is None:
            is_recording = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if is_recording or self._num_bytes + len(content) > _MOST_BYTES:
                return None
            source = constant.pin_memory() if self._device.type == "cuda" else constant
            copy = self._copies[key] = source.to(self._device, non_blocking=True)
            self._num_bytes += len(content)
        return copy.clone()

    def _is_here(self, device: Any) -> bool:
        if device is None:
            return False
        device = torch.device(device)
        return device.type == self._device.type and device.index in (None, self._device.index)

    def _is_constant(self, tensor: Tensor) -> bool:
        return _get_address(tensor) in self._constants

    def _note(self, results: Iterable[Any]) -> None:
        for result in results:
            is_plain = type(result) is Tensor and not result.requires_grad
            if is_plain and result.device.type == "cpu" and result.numel():
                self._constants[_get_address(result)] = result


@contextmanager
def without_host_constants() -> Iterator[None]:
    """Inside, compiled code can run: torch recompiles it if a function mode is active."""
    mode = get_function_mode()
    if not isinstance(mode, HostConstants):  # one of the user's own is on top, and stays there
        yield
        return
    TorchFunctionMode.__exit__(mode, None, None, None)
    try:
        yield
    finally:
        TorchFunctionMode.__enter__(mode)


def _get_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.device.type == "cpu" else 0


def _writes(func: Callable[..., Any]) -> bool:
    """Whether a function changes a tensor that it is given."""
    name: str = func.__name__
    return func is Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__"))
