"""Modules: what ``nn.Module`` stores about calls, buffers and moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PRIVATE_NAMES = {
    "torch.nn.utils.parametrize._cache_enabled": "weights that a script computes once for several "
    "calls, which a recording would take for its own",
    "torch.nn.Module._parameters": "replacing whole parameters by split ones",
    "torch.nn.Module._modules": "seeing whether a module was replaced",
    "torch.nn.Module._call_impl": "running a module under torch.compile",
    "torch.nn.Module._compiled_call_impl": "letting a call run compiled",
    **{
        f"torch.nn.Module.{name}": "hooks that would see a part of an activation" for name in _HOOKS
    },
    **{
        f"torch.nn.modules.module._global{name}": "hooks on all modules, for the same reason"
        for name in _HOOKS
    },
    "torch.nn.Module._apply": "giving memory to the parameters of a split model",
    "torch.nn.Module._non_persistent_buffers_set": "buffers that another stage saves",
    "torch.nn.Module._buffers": "giving a closed pipeline's buffers back",
}

WEIGHT_TABLES = ("_parameters", "_buffers")
"""A module's attributes that hold its weights."""


def get_parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters as stored; ``getattr`` would ask a split layer's properties."""
    return module._parameters


def get_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's own parameters and children as stored; the same objects for as long as it is."""
    return module._parameters, module._modules


def caches_weights() -> bool:
    """Whether ``parametrize.cached()`` keeps what modules compute their weights from."""
    return bool(parametrize._cache_enabled)


def call_plainly(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the module with its hooks, bypassing its compiled version."""
    return module._call_impl(*args, **kwargs)


def run_forward_hooks(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Run hooks that only look at what the module has returned."""
    for hook in module._forward_hooks.values():
        hook(module, args, output)


@contextmanager
def uncompiled(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, those of these modules that are compiled run as they are."""
    calls = [(m, m._compiled_call_impl) for m in modules if m._compiled_call_impl is not None]
    for module, _ in calls:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in calls:
            module._compiled_call_impl = call


def get_compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What ``module(...)`` runs instead of its own forward pass, if something was set."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Make ``module(...)`` run this instead, which must also run the hooks; None: as it is."""
    module._compiled_call_impl = call


def replace_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer by ``function(tensor)``, like ``to`` does."""
    module._apply(function)


def leave_out_of_state(module: nn.Module, buffer: str) -> None:
    """Exclude the buffer from ``state_dict`` from now on."""
    module._non_persistent_buffers_set.add(buffer)


def get_buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers as stored."""
    return module._buffers


def list_unsaved(module: nn.Module) -> set[str]:
    """The buffers that ``state_dict`` leaves out."""
    return module._non_persistent_buffers_set


def list_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """All hooks registered around the module's forward and backward passes."""
    return [hook for table in list_hook_tables(module) for hook in table.values()]


def list_hook_tables(module: nn.Module) -> list[Mapping[int, Callable[..., Any]]]:
    """Where the module keeps its hooks; the same objects for as long as it exists."""
    return [getattr(module, name) for name in _HOOKS]


def list_global_hook_tables() -> list[Mapping[int, Callable[..., Any]]]:
    """Where torch keeps the hooks that run around every module."""
    return [getattr(torch.nn.modules.module, f"_global{name}") for name in _HOOKS]
