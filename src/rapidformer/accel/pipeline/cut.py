"""Which parameters stay on this rank, and how the others are dropped.

Modules stay where they are, so names, indices and attributes that a model's code reads are valid on
every rank. A parameter that lives elsewhere is replaced by a placeholder without memory: the
model's own code may compute with it (the result is NaN, and never used), user code may not.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Set
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from rapidformer.accel.pipeline.discovery import Usage
from rapidformer.accel.pipeline.layout import Layout
from rapidformer.accel.split.absent import build_placeholder
from rapidformer.compat.torch_modules import get_parameter_table, leave_out_of_state
from rapidformer.models.plan import ModelPlan


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Every parameter's name -> the pipeline ranks that hold it."""

    processes_of: dict[str, frozenset[int]]

    def get_held(self, process: int) -> set[str]:
        """The names of everything that stays on a rank."""
        return {name for name, holders in self.processes_of.items() if process in holders}


def find_holdings(model: nn.Module, plan: ModelPlan, layout: Layout, usage: Usage) -> Holdings:
    """Where each parameter is needed. All names of a tied parameter stay together."""
    everywhere = frozenset(range(layout.num_processes))
    holders: dict[str, frozenset[int]] = {}
    by_module: dict[str, list[str]] = defaultdict(list)
    number_of = {f"{name}.": index for index, name in enumerate(plan.blocks)}
    for name, _ in model.named_parameters(remove_duplicate=False):
        block = next((i for prefix, i in number_of.items() if name.startswith(prefix)), None)
        blocks = {block} if block is not None else usage.blocks_of[name]
        holders[name] = frozenset(map(layout.find_owner, blocks))
        by_module[name.rpartition(".")[0]].append(name)
    # A module's own parameters stay together too: a layer has both weight and bias, or neither.
    for names in (*plan.tied, *by_module.values(), *plan.tied):
        together = frozenset[int]().union(*(holders[name] for name in names))
        holders |= dict.fromkeys(names, together)
    # A parameter that the hollow forward pass did not meet may be needed anywhere.
    return Holdings(processes_of={name: holders[name] or everywhere for name in holders})


def apply_cut(
    model: nn.Module, held: Set[str], device: torch.device, explain: Callable[[str], str]
) -> nn.Module:
    """Drop parameters that are not held (``explain`` says why); place the others, as rank 0's."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    done: dict[int, nn.Parameter] = {}
    for prefix, module in list(model.named_modules()):
        for name, parameter in list(get_parameter_table(module).items()):
            if parameter is None:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            if not parameter.is_meta and id(parameter) not in done:
                done[id(parameter)] = parameter  # kept alive, since ids are reused
                weights = _broadcast(parameter.data.to(device))
                if full_name in held:
                    parameter.data = weights
            if full_name not in held:
                del get_parameter_table(module)[name]
                why = functools.partial(explain, full_name)
                # A plain attribute, not a buffer: it is in no checkpoint and never moves.
                module.__dict__[name] = build_placeholder(parameter, device, why)
    _cut_buffers(model, names, held, device)
    return model


def _cut_buffers(model: nn.Module, names: Set[str], held: Set[str], device: torch.device) -> None:
    """Give every rank the first one's buffers, since masks are needed where no weight is."""
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the first one is kept alive
    for prefix, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                continue
            if id(buffer) not in done:
                done[id(buffer)] = buffer, _broadcast(buffer.to(device))
            setattr(module, name, done[id(buffer)][1])
            if not _is_here(prefix, names, held):
                leave_out_of_state(module, name)


def _is_here(module: str, names: Set[str], held: Set[str]) -> bool:
    """Whether this rank holds parameters of a module, or of its parents if it has none."""
    inside = {name for name in names if not module or name.startswith(f"{module}.")}
    if module and not inside:
        return _is_here(module.rpartition(".")[0], names, held)
    return not inside or not inside.isdisjoint(held)


def _broadcast(values: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(values, src=0)
    return values
