"""Split weights in a script's own code: hooks, items that are set, autograd functions.

``p.register_hook(...)``, ``p.grad[:10] = 0`` and ``MyFunction.apply(p, x)`` are written for whole
tensors. ZeRO and tensor parallelism have put DTensors in their place: torch runs no hook of a
parameter that ``fully_shard`` gathers, and has no sharding for the other two. Here they get what
they expect: a hook the whole gradient of this rank's rows, as in data parallelism, and an autograd
function the whole weight, whose gradient goes back to the shards.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.data_parallel import shape_like
from rapidformer.accel.sharding.zero import gather_weight
from rapidformer.accel.split.on_demand import WholeOnDemand
from rapidformer.accel.weights import find_spans
from rapidformer.compat.patches import Entry, Patch
from rapidformer.compat.torch_dispatch import convert_function_arguments
from rapidformer.compat.torch_fsdp import list_parameter_groups
from rapidformer.compat.torch_tensors import get_gradient_hooks
from rapidformer.dist.whole import join_whole
from rapidformer.log import warn_once
from rapidformer.models.watched import is_from_user

Hook = Callable[[Tensor], Tensor | None]
_FACTOR = 2.0**20
"""To see whether a hook is linear, a gradient is scaled by this: far beyond any clipping."""


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
        assembly.applied.enter(_SETTING_ITEMS)
        gather = functools.partial(_gather_for_function, weakref.ref(assembly.synchronizer))
        for kind in (DTensor, WholeOnDemand):
            assembly.applied.enter(convert_function_arguments(kind, gather))
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
        return shape_like(changed[_find_places(gradient)].contiguous(), gradient)


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
        # The trial must not change what the hook, or dropout, draws later.
        with torch.random.fork_rng([gradient.device] if gradient.is_cuda else []):
            scaled = hook(gradient * _FACTOR)
        if scaled is None or not torch.allclose(scaled, answer * _FACTOR, rtol=1e-3):
            warn_once(
                "a hook on a parameter's gradient is not linear (it clips, adds noise or a "
                "penalty): it sees the gradient of one rank's micro-batch, not that of the "
                "whole update, so the result depends on how the batch is split. Change the "
                "gradients between engine.backward() and optimizer.step() instead."
            )
        return answer

    return watched


# ---- items and functions -------------------------------------------------------------------------


def _find_places(tensor: Tensor) -> tuple[Tensor, ...]:
    """Where this rank's slice is in the whole tensor: an index for each dimension."""
    rows = [torch.cat([torch.arange(*span) for span in spans]) for spans in find_spans(tensor)]
    # Shaped so that they are combined with each other, without a list of all combinations.
    sizes = torch.eye(len(rows), dtype=torch.long).mul(-2).add(1).tolist()
    return tuple(row.view(size).to(tensor.device) for row, size in zip(rows, sizes, strict=True))


def _set_items(self: Any, index: Any, value: Any) -> None:
    """``tensor[index] = value`` as if the tensor were whole; every rank sets its own slice."""
    if torch.is_grad_enabled() and self.requires_grad:
        Tensor.__setitem__(self, index, value)  # refused, or recorded, by torch
        return
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(join_whole(part) if isinstance(part, DTensor) else part for part in parts)
    with torch.no_grad():
        local = self.to_local()
        places = _find_places(self)
        # What other ranks hold is not needed to set items here.
        whole = local.new_zeros(self.shape)
        whole[places] = local
        whole[parts] = join_whole(value) if isinstance(value, DTensor) else value
        local.copy_(whole[places])


_SETTING_ITEMS = Patch(lambda: [Entry(DTensor, "__setitem__", lambda _: _set_items)])
"""Inside, items of split tensors can be set."""


def _gather_for_function(synchronizer: weakref.ref[Any], function: type, weight: Any) -> Any:
    """The whole of a weight that a script's own autograd function is called with."""
    if not is_from_user(function):
        return weight
    is_whole = isinstance(weight, WholeOnDemand)
    return weight.full_tensor() if is_whole else gather_weight(synchronizer(), weight)
