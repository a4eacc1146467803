"""The weights of a plain model, given back when an engine closes, which is collective.

What stays here is where each parameter was, which were tied, and its dtype, but not the parameter:
a whole weight must not outlive its shards. Trained weights keep the precision that they were
trained in; frozen ones return to theirs.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rapidformer.compat.torch_modules import get_buffer_table, get_parameter_table, list_unsaved
from rapidformer.compat.torch_tensors import get_gradient_hooks
from rapidformer.dist.collectives import gather_from_all, gather_from_stages, is_alone
from rapidformer.dist.topology import Topology
from rapidformer.dist.whole import join_whole
from rapidformer.host_memory import measure_free_memory
from rapidformer.log import warn_once


def measure_free(device: torch.device) -> float:
    """Bytes that new tensors may take."""
    if device.type != "cuda":
        return measure_free_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@dataclass(eq=False, kw_only=True)
class _Weight:
    """A parameter of the plain model."""

    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Its owners, with their names for it: several if it is tied."""
    reference: weakref.ref[nn.Parameter]
    dtype: torch.dtype
    shape: torch.Size
    exact: Tensor | None = None
    """In host memory, the values of a frozen weight that was rounded, if casting back loses any."""

    def returns(self, dtype: torch.dtype, *, is_trained: bool) -> bool:
        """Whether it gets its precision back: a trained one keeps a higher precision."""
        is_rounded = dtype.itemsize < self.dtype.itemsize
        return dtype != self.dtype and (is_rounded or not is_trained)

    def find_current(self) -> nn.Parameter | None:
        """What its owners have now; None if it is on another pipeline stage."""
        tables = [(get_parameter_table(module), name) for module, name in self.places]
        return next((table[name] for table, name in tables if table.get(name) is not None), None)


class PlainWeights:
    """Where the parameters of a model were before anything was applied."""

    def __init__(self, model: nn.Module | None = None, topology: Topology | None = None) -> None:
        model = model if model is not None else nn.Module()
        self.names = {name: weakref.ref(p) for name, p in model.named_parameters()}
        """Each parameter's name, and the parameter while somebody holds it."""
        self.hooks = {name: get_gradient_hooks(p) for name, p in model.named_parameters()}
        """The hooks that users have registered on each, or None."""
        self.measure_free = measure_free
        self._topology = topology or Topology()
        self._orders = {module: tuple(get_parameter_table(module)) for module in model.modules()}
        self._unsaved = {module: set(list_unsaved(module)) for module in model.modules()}
        self._weights: dict[int, _Weight] = {}
        self._optimizers: list[tuple[weakref.ref[Optimizer], list[list[int]]]] = []
        """Each with its groups of weights."""
        for module in model.modules():
            for name, p in get_parameter_table(module).items():
                if p is not None:
                    weight = _Weight(reference=weakref.ref(p), dtype=p.dtype, shape=p.shape)
                    self._weights.setdefault(id(p), weight).places.append((module, name))

    def keep_exact(self, parameter: nn.Parameter, rounded: torch.dtype) -> None:
        """Before a frozen weight is rounded: keep its values, unless casting back is exact."""
        weight = self._weights.get(id(parameter))
        if weight is None or weight.reference() is not parameter or parameter.is_meta:
            return
        exact = parameter.detach().to(weight.dtype)
        if not torch.equal(exact.to(rounded).to(weight.dtype), exact):
            weight.exact = exact.cpu()

    def follow(self, optimizer: Optimizer) -> None:
        """Point an optimizer of plain or split parameters to the plain ones when they return."""
        # By living objects: the id of a parameter that was dropped may be another's by now.
        weights = self._weights.items()
        known = ((p, key) for key, w in weights for p in (w.find_current(), w.reference()))
        keys = {id(p): key for p, key in known if p is not None}
        if any(id(p) not in keys for group in optimizer.param_groups for p in group["params"]):
            return  # it trains something else as well, which is refused next
        groups = [[keys[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self._optimizers.append((weakref.ref(optimizer), groups))

    def are_untouched(self) -> bool:
        """Whether all parameters are still the ones that were there before."""
        current = [(weight.find_current(), weight.reference()) for weight in self._weights.values()]
        return all(now is not None and now is before for now, before in current)

    def have_room(self) -> bool:
        """Whether the whole weights fit into free memory on every rank; says so if they do not."""
        if self.are_untouched() and self._topology.pipeline == 1:
            return True
        optimizers = [optimizer for ref, _ in self._optimizers if (optimizer := ref()) is not None]
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        split = [v for state in states for v in state.values() if isinstance(v, DTensor)]
        needed = sum(map(_count_new_bytes, self._weights.values()))
        needed += sum(value.numel() * value.dtype.itemsize for value in split)
        devices = {p.device for w in self._weights.values() if (p := w.find_current()) is not None}
        free = min((self.measure_free(device) for device in devices), default=0.0)
        needs = [(needed, free)] if is_alone() else gather_from_all((needed, free))
        worst = max(needs, key=lambda pair: pair[0] - pair[1])
        if worst[0] <= worst[1]:
            return True
        warn_once(
            "the model keeps its weights split over the ranks: making them whole again needs "
            f"{worst[0] / 2**30:.1f} GiB more memory, and only {worst[1] / 2**30:.1f} GiB is free. "
            "engine.export(folder) writes the whole model."
        )
        return False

    def restore(self) -> None:
        """Give every module its whole parameters again; every rank must call this."""
        sources = self._find_sources()
        replaced: dict[int, nn.Parameter] = {}
        optimizers = list(self._collect_states())
        for key, weight in self._weights.items():
            replaced[key] = self._make_plain(weight, weight.find_current(), sources.get(key))
            for module, name in weight.places:
                get_parameter_table(module)[name] = replaced[key]
        for module, names in self._orders.items():
            table = get_parameter_table(module)
            ordered = {name: table[name] for name in names if name in table} | table
            table.clear()
            table.update(ordered)
        self._restore_buffers()
        for optimizer, groups, states in optimizers:
            for group, members in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = [replaced[m] if isinstance(m, int) else m for m in members]
            optimizer.state.clear()
            for member, values in states:
                parameter = replaced[member] if isinstance(member, int) else member
                optimizer.state[parameter] = {
                    name: join_whole(value) if isinstance(value, DTensor) else value
                    for name, value in values.items()
                }

    def _make_plain(
        self, weight: _Weight, current: nn.Parameter | None, source: _Source | None
    ) -> nn.Parameter:
        original = weight.reference()
        if current is not None and current is original:
            if weight.returns(current.dtype, is_trained=current.requires_grad):
                current.data = _return_to_dtype(weight, current.data)
            if source is not None:
                _broadcast(current.data, source, self._topology)
            return current
        values = None if current is None else join_whole(current).to(current.device)
        is_trained = current is not None and current.requires_grad
        if source is not None:
            values = _broadcast(values, source, self._topology)
            is_trained = source.is_trained
        assert values is not None
        if weight.returns(values.dtype, is_trained=is_trained):
            values = _return_to_dtype(weight, values)
        if original is None or original.is_meta:
            return nn.Parameter(values, requires_grad=is_trained)
        original.data = values  # a list of parameters made before compose is valid again
        original.grad = None
        original.requires_grad_(is_trained)
        return original

    def _find_sources(self) -> dict[int, _Source]:
        """For each weight that a stage lacks: the stage that sends it. Empty without a pipeline."""
        if self._topology.pipeline == 1:
            return {}
        stage = self._topology.get_rank("pipeline")
        held = {
            index: _Source(stage, p.dtype, p.requires_grad, weight.shape)
            for index, weight in enumerate(self._weights.values())
            if (p := weight.find_current()) is not None
        }
        by_stage = gather_from_stages(held, self._topology)
        sources: dict[int, _Source] = {}
        for index, key in enumerate(self._weights):
            holders = [held[index] for held in by_stage if index in held]
            if len(holders) < len(by_stage):
                sources[key] = holders[0]
        return sources

    def _restore_buffers(self) -> None:
        """What a layer counts in its buffers is right only on its own stage."""
        if self._topology.pipeline == 1:
            return
        for module, before in self._unsaved.items():
            for name, buffer in get_buffer_table(module).items():
                if buffer is None or name in before:
                    continue
                away = gather_from_stages(name in list_unsaved(module), self._topology)
                if any(away):
                    source = _Source(away.index(False), buffer.dtype, False, buffer.shape)
                    _broadcast(buffer, source, self._topology)

    def _collect_states(self) -> Iterator[_Held]:
        """What each optimizer holds, by weight; groups added after compose may hold others, too."""
        current = {id(w.find_current()): key for key, w in self._weights.items()}
        for reference, groups in self._optimizers:
            if (optimizer := reference()) is not None:
                added = [group["params"] for group in optimizer.param_groups[len(groups) :]]
                members = [*groups, *([current.get(id(p), p) for p in ps] for ps in added)]
                known = {*current, *(id(p) for ps in added for p in ps)}
                states: Any = [item for item in optimizer.state.items() if id(item[0]) in known]
                yield _Held(optimizer, members, [(current.get(id(p), p), v) for p, v in states])


class _Held(NamedTuple):
    """What an optimizer holds: keys of weights, and parameters that are not the model's."""

    optimizer: Optimizer
    groups: list[list[int | nn.Parameter]]
    state: list[tuple[int | nn.Parameter, dict[str, Any]]]


@dataclass(frozen=True)
class _Source:
    """Where a weight comes from that a pipeline stage lacks."""

    stage: int
    dtype: torch.dtype
    is_trained: bool
    shape: torch.Size


def _broadcast(values: Tensor | None, source: _Source, topology: Topology) -> Tensor:
    mesh = topology.get_submesh("pipeline")
    assert mesh is not None
    if values is None:
        device = torch.device("cpu" if mesh.device_type == "cpu" else torch.cuda.current_device())
        values = torch.empty(source.shape, dtype=source.dtype, device=device)
    group = mesh.get_group()
    dist.broadcast(values, src=dist.get_global_rank(group, source.stage), group=group)
    return values


def _return_to_dtype(weight: _Weight, values: Tensor) -> Tensor:
    if weight.exact is not None:
        exact = weight.exact.to(values.device)
        if torch.equal(exact.to(values.dtype), values):  # nothing was loaded since
            return exact
    return values.to(weight.dtype)


def _count_new_bytes(weight: _Weight) -> int:
    """Bytes of a whole weight that this rank has only a part of, which stays until the end."""
    current = weight.find_current()
    if current is not None and current is weight.reference():
        return 0
    return weight.shape.numel() * (weight.dtype if current is None else current.dtype).itemsize
