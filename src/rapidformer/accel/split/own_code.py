"""Split weights in a script's own code: hooks, autograd functions, and items (``items.py``).

``p.register_hook(...)`` and ``MyFunction.apply(p, x)`` are written for whole tensors. ZeRO and
tensor parallelism have put DTensors in their place: torch runs no hook of a parameter that
``fully_shard`` gathers, and has no sharding for the other. Here they get what they expect: a hook
the whole gradient of this rank's rows, as in data parallelism, and an autograd function the whole
weight, whose gradient goes back to the shards.
"""

from __future__ import annotations

import dis
import functools
import inspect
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.data_parallel import shape_like
from rapidformer.accel.sharding.zero import gather_weight
from rapidformer.accel.split.items import CHANGING_ITEMS, find_places
from rapidformer.accel.split.on_demand import WholeOnDemand
from rapidformer.compat.torch_dispatch import convert_function_arguments
from rapidformer.compat.torch_fsdp import list_parameter_groups
from rapidformer.compat.torch_tensors import get_gradient_hooks
from rapidformer.dist.whole import join_whole
from rapidformer.log import warn_once
from rapidformer.models.side_effects.pure_calls import PURE_BUILTINS
from rapidformer.models.watched import is_from_user
from rapidformer.overlay import find_fact, put_fact

Hook = Callable[[Tensor], Tensor | None]
_FACTOR = 2.0**20
"""To see whether a hook is linear, a gradient is scaled by this: far beyond any clipping."""
_PURE = (torch, nn.functional, math)
_NOT_LINEAR = (
    "a hook on a parameter's gradient {}): it sees the gradient of one rank's micro-batch, not "
    "that of the whole update, so what clips, adds noise or a penalty depends on how the batch is "
    "split. Change the gradients between engine.backward() and optimizer.step() instead."
)


def apply(assembly: Assembly) -> str | None:
    """Serve the hooks of all parameters, and the items and functions of split ones."""
    if assembly.uses_deepspeed:
        return None
    model, known = assembly.model, assembly.applied.plain.hooks
    micro_batches = assembly.args.gradient_accumulation_steps or 1
    split = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    served = {id(p): _Hooks(name, known.get(name)) for name, p in split.items()}
    for parameter in split.values():
        served[id(parameter)].serve(parameter)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _serve_gathered(module, served)
    if split:
        assembly.applied.enter(CHANGING_ITEMS)
        synchronized = _Synchronized(weakref.ref(assembly.synchronizer))
        for parameter in split.values():
            put_fact(parameter, synchronized)
        for kind in (DTensor, WholeOnDemand):
            assembly.applied.enter(convert_function_arguments(kind, _gather_for_function))
    if assembly.topology.num_replicas * micro_batches > 1:
        _watch_hooks(model, [hooks.functions for hooks in served.values()])
    return None


# ---- hooks ---------------------------------------------------------------------------------------


class _Hooks:
    """The hooks of one parameter, whichever tensor stands for it now."""

    def __init__(self, name: str, functions: dict[int, Hook] | None) -> None:
        self.name = name
        # The same table, if there is one: a handle that the user holds removes its hook from it.
        self.functions = OrderedDict() if functions is None else functions

    def serve(self, tensor: Tensor) -> None:
        """Let this tensor register hooks here, and run them when its gradient is computed."""
        if tensor.requires_grad:
            Tensor.register_hook(tensor, self.run)
        tensor.register_hook = self.register  # type: ignore[method-assign]

    def register(self, hook: Hook) -> RemovableHandle:
        handle = RemovableHandle(self.functions)
        self.functions[handle.id] = hook
        return handle

    def run(self, gradient: Tensor) -> Tensor | None:
        if not self.functions:
            return None
        whole = changed = join_whole(gradient)
        for hook in list(self.functions.values()):
            answer = hook(changed)
            changed = changed if answer is None else answer
        if changed is whole:
            return None
        if not isinstance(gradient, DTensor):
            return changed
        return shape_like(changed[find_places(gradient)].contiguous(), gradient)


def runs_no_hook(hook: object) -> bool:
    """Whether a hook of a tensor is one of ours that has nothing of the user's to run."""
    owner = getattr(hook, "__self__", None)
    return isinstance(owner, _Hooks) and not owner.functions


def _serve_gathered(module: Any, served: dict[int, _Hooks]) -> None:
    """The tensor in which a weight is gathered exists from its first use on, and is kept."""
    waiting = [p for group in list_parameter_groups(module) for p in group.fsdp_params]

    def serve(module: nn.Module, inputs: Any) -> None:
        while waiting:
            parameter = waiting.pop()
            hooks = served.get(id(parameter.sharded_param))
            if hooks is not None:
                hooks.serve(parameter.unsharded_param)

    module.register_forward_pre_hook(torch.compiler.disable(serve))


def _watch_hooks(model: nn.Module, tables: list[dict[int, Hook]]) -> None:
    """Before the first pass: warn of hooks whose result depends on how an update is split."""

    def watch(model: nn.Module, inputs: Any) -> None:
        handle.remove()
        plain = [get_gradient_hooks(parameter) for parameter in model.parameters()]
        for table in (*tables, *plain):
            for number, hook in (table or {}).items():
                if is_from_user(hook):
                    table[number] = _warn_if_not_linear(hook, table, number)

    handle = model.register_forward_pre_hook(torch.compiler.disable(watch))


def _warn_if_not_linear(hook: Hook, table: dict[int, Hook], number: int) -> Hook:
    """Tries the hook the first time that it changes a gradient, then puts it back."""

    @functools.wraps(hook)
    def watched(gradient: Tensor) -> Tensor | None:
        answer = hook(gradient)
        if answer is None or table.get(number) is not watched:
            return answer
        table[number] = hook
        if answer is gradient:
            return answer  # changed in place: there is nothing left to try it on
        if _may_remember(hook):
            warn_once(_NOT_LINEAR.format("may not be linear (it keeps values, so it is not tried"))
            return answer
        # The trial must not change what the hook, or dropout, draws later.
        with torch.random.fork_rng([gradient.device] if gradient.is_cuda else []):
            scaled = hook(gradient * _FACTOR)
        if scaled is None or not torch.allclose(scaled, answer * _FACTOR, rtol=1e-3):
            warn_once(_NOT_LINEAR.format("is not linear (it clips, adds noise or a penalty"))
        return answer

    return watched


def _may_remember(hook: Hook) -> bool:
    """Whether a hook could notice another call, for all that its code shows."""
    if not isinstance(hook, FunctionType):
        return True
    outside = inspect.getclosurevars(hook)
    values = [*outside.nonlocals.values(), *outside.globals.values()]
    holds_tensors = any(isinstance(value, Tensor) for value in values)
    operations = {instruction.opname for instruction in dis.get_instructions(hook)}
    return (
        bool(operations & {"STORE_GLOBAL", "STORE_DEREF"})
        or (holds_tensors and any(name.endswith("_") for name in hook.__code__.co_names))
        or not outside.builtins.keys() <= PURE_BUILTINS
        or not all(
            isinstance(value, (Tensor, int, float)) or any(value is pure for pure in _PURE)
            for value in values
        )
    )


# ---- functions -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Synchronized:
    """A fact on a split weight: what reduces its gradient, since engines may stand side by side."""

    by: weakref.ref[Any]


def _gather_for_function(function: type, weight: Any) -> Any:
    """The whole of a weight that a script's own autograd function is called with."""
    if not is_from_user(function):
        return weight
    if isinstance(weight, WholeOnDemand):
        return weight.full_tensor()
    synchronized = find_fact(weight, _Synchronized)
    return gather_weight(synchronized.by() if synchronized is not None else None, weight)
