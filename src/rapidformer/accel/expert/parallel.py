"""Expert parallelism: each rank holds some of every mixture's experts.

Tokens are routed on their own rank; rows then travel to the owners of their experts and back. The
experts' parameters become DTensors, split along dimension 0. The ranks that divide the experts see
*different* tokens, so an expert's gradient already includes all of them when it arrives, and is
summed only over the ranks that hold the same experts. A compiled block breaks its graph here: how
many rows travel is known only at run time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.tensor.slices import distribute
from rapidformer.accel.tensor.styles import Split, Style, extend_class, inside_a_call
from rapidformer.compat.torch_distributed import QUIET_JOINING
from rapidformer.compat.torch_modules import get_parameter_table
from rapidformer.compat.transformers_models import get_expert_plan
from rapidformer.config.layout_rules import list_choices
from rapidformer.dist.regions import Group, exchange
from rapidformer.errors import ConfigurationError
from rapidformer.models.plan import ModelPlan, expand_patterns
from rapidformer.models.tensor_plans import describe_model, has_adapter
from rapidformer.overlay import extend, get_fact

_FLAG = "--expert-model-parallel-size"
_SPLIT_EXPERTS = "grouped_gemm"
_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")


def apply(assembly: Assembly) -> str:
    """Split the experts; their gradients are summed over different ranks than the rest."""
    model, mesh = assembly.model, assembly.topology.get_expert_mesh("expert")
    assert mesh is not None
    assembly.applied.enter(QUIET_JOINING)
    styles = dict(find_experts(model, assembly.plan))
    if problems := list(_find_problems(model, styles, mesh.size())):
        raise ConfigurationError(problems)
    for name, style in styles.items():
        module: Any = model.get_submodule(name)
        for key, parameter in get_parameter_table(module).items():
            if parameter is not None:
                get_parameter_table(module)[key] = distribute(parameter, Shard(0), mesh)
        if style is RoutedExperts:
            module.num_experts //= mesh.size()
        extend_class(module, Split(mesh=mesh), style)
        assembly.experts.append(module)
    if hasattr(model, "generate") and not assembly.args.zero_stage:
        extend(model, "experts", _build_generate)
    return f"{mesh.size()} ranks"


def _build_generate(cls: Any) -> dict[str, Any]:
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Rows of all ranks pass through the experts: all must generate equally many tokens.
        return cls.generate(self, *args, **{"synced_gpus": True, **kwargs})

    return {"generate": generate}


def find_experts(model: nn.Module, plan: ModelPlan) -> Iterator[tuple[str, type]]:
    """Expert modules, by the model's own plan or by transformers'."""
    if plan.experts:
        yield from expand_patterns(model, dict.fromkeys(plan.experts, SortedExperts))
        return
    patterns = get_expert_plan(model)
    parents = {p.rpartition(".")[0] for p, style in patterns.items() if style == _SPLIT_EXPERTS}
    yield from expand_patterns(model, dict.fromkeys(sorted(parents), RoutedExperts))


def _find_problems(model: nn.Module, styles: dict[str, type], size: int) -> Iterator[str]:
    model_name = describe_model(model)
    if not styles:
        yield (
            f"{_FLAG} {size}: {model_name} has no experts to distribute: neither transformers' "
            "plan (base_model_ep_plan) nor rapidformer_plan() with 'experts' names any. Remove "
            "the flag."
        )
    for name, style in styles.items():
        module = model.get_submodule(name)
        numbers = {len(p) for p in module.parameters(recurse=False)}
        arguments = tuple(inspect.signature(inspect.unwrap(type(module).forward)).parameters)
        if has_adapter(module):
            yield (
                f"{_FLAG} {size} cannot split the adapter of {name}: leave the experts out of "
                "target_parameters, or use --zero-3-memory-optimization instead."
            )
        elif style is RoutedExperts and arguments[1:] != _ARGUMENTS:
            yield (
                f"{_FLAG} {size}: {name} of {model_name} takes {', '.join(arguments[1:])} instead "
                f"of {', '.join(_ARGUMENTS)}, so its rows cannot be sent to other ranks."
            )
        elif len(numbers) != 1 or next(iter(numbers)) % size:
            number = min(numbers, default=0)
            yield (
                f"{_FLAG} {size} does not divide the {number} experts of {name} of {model_name}: "
                f"use {list_choices(number)}."
            )


class SortedExperts(Style):
    """Experts that take rows sorted by expert, and the end of each expert's rows."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
        route = plan_route(counts, get_fact(self, Split).group)
        own_ends = route.counts.cumsum(dim=0).to(ends.dtype)
        with inside_a_call():
            made = super().forward(route.send(rows), own_ends)  # type: ignore[misc]
        return route.send_back(made)


class RoutedExperts(Style):
    """Hugging Face's experts: tokens with the experts chosen for them."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        split, choices = get_fact(self, Split), top_k_index.shape[-1]
        own: int = self.num_experts  # type: ignore[attr-defined]
        by_expert, order = top_k_index.flatten().sort(stable=True)
        counts = torch.bincount(by_expert, minlength=own * split.mesh.size())
        route = plan_route(counts, split.group)
        copies = hidden_states.unsqueeze(1).expand(-1, choices, -1).flatten(0, 1)
        rows = route.send(copies.index_select(0, order))
        numbers = torch.arange(own, device=rows.device).repeat_interleave(route.counts)
        # Each row is sent unweighted; its weight is known where it came from.
        ones = top_k_weights.new_ones(len(rows), 1)
        with inside_a_call():
            made = super().forward(rows, numbers[:, None], ones)  # type: ignore[misc]
        chosen = route.send_back(made).index_select(0, order.argsort()).unflatten(0, (-1, choices))
        mixed: Tensor = (chosen * top_k_weights[..., None]).sum(dim=1)
        return mixed.to(hidden_states.dtype)


@dataclass(frozen=True)
class Route:
    """How many rows this rank sends to, and receives from, each rank of the group."""

    group: Group
    sent: list[int]
    received: list[int]
    order: Tensor
    """Sorts received rows, which arrive by rank, by this rank's experts."""
    counts: Tensor
    """Rows received for each of this rank's experts."""

    def send(self, rows: Tensor) -> Tensor:
        """Send rows sorted by expert to their owners; what arrives is sorted by local expert."""
        arrived: Tensor = _Exchange.apply(rows, self.sent, self.received, self.group)
        return arrived.index_select(0, self.order)

    def send_back(self, rows: Tensor) -> Tensor:
        """Send the results back to where the rows came from, in their original order."""
        by_process = rows.index_select(0, self.order.argsort())
        return _Exchange.apply(by_process, self.received, self.sent, self.group)


def plan_route(counts: Tensor, group: Group) -> Route:
    """Built from the number of rows this rank has for each expert; waits for the device."""
    size = dist.get_world_size(group)
    mine = counts.view(size, -1)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine.contiguous(), group=group)
    experts = torch.arange(theirs.shape[1], device=counts.device).repeat(size)
    by_arrival = experts.repeat_interleave(theirs.flatten())
    sent, received = torch.stack([mine.sum(dim=1), theirs.sum(dim=1)]).tolist()
    order = by_arrival.argsort(stable=True)
    return Route(group, sent, received, order, theirs.sum(dim=0))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Group
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return exchange(gradient, ctx.received, ctx.sent, ctx.group), None, None, None
