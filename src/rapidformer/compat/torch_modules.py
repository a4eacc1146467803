"""Modules: what ``nn.Module`` keeps about calls, buffers and moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

PRIVATE_NAMES = {
    "torch.nn.Module._parameters": "putting split parameters in the place of whole ones",
    "torch.nn.Module._call_impl": "running a module under torch.compile",
    "torch.nn.Module._compiled_call_impl": "letting a call run compiled",
    "torch.nn.Module._forward_hooks": "finding hooks that would see a part of an activation",
    "torch.nn.Module._forward_pre_hooks": "the same",
    "torch.nn.Module._backward_hooks": "the same",
    "torch.nn.Module._backward_pre_hooks": "the same",
    "torch.nn.Module._apply": "giving memory to the parameters of a split model",
    "torch.nn.Module._non_persistent_buffers_set": "buffers that another stage saves",
}


def get_parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters as it stores them: what is put there replaces a parameter.

    Not ``getattr``: a layer that was split reads its weights through properties.
    """
    return module._parameters


def call_plainly(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the module with its hooks, though it was compiled."""
    return module._call_impl(*args, **kwargs)


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let ``module(...)`` run this instead; hooks are up to it."""
    module._compiled_call_impl = call  # type: ignore[assignment]


def replace_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Put ``function(tensor)`` in the place of every parameter and buffer, as ``to`` does."""
    module._apply(function)


def leave_out_of_state(module: nn.Module, buffer: str) -> None:
    """Let ``state_dict`` leave the buffer out from now on."""
    module._non_persistent_buffers_set.add(buffer)


def list_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Everything that was registered to run around the module's passes."""
    tables = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return [hook for table in tables for hook in table.values()]
