"""One AdamW update of a set of parameters: its tables on the device, and its launches.

The arithmetic is that of torch's fused AdamW: fp32, with the same roundings in the same order. Only
the powers of the betas may differ in their last bit, since torch computes them in fp32.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from rapidformer.compat.torch_distributed import list_local
from rapidformer.compat.triton import on_device
from rapidformer.dist.whole import get_shard
from rapidformer.optim.multi_tensor.tables import (
    HOST,
    NUMBERS,
    Mirror,
    build_chunks,
    is_recording,
    send,
)

CHUNK, BLOCK, WARPS = 4096, 1024, 4
_TENSORS_AT_ONCE = 128

Group = dict[str, Any]


class Source(Protocol):
    """The optimizer, as a launch sees it."""

    param_groups: list[Group]
    state: Any
    rounds_randomly: bool
    """Whether moments in bf16 are rounded up or down at random instead of to the nearest."""

    def get_state(self, parameter: Any) -> dict[str, Tensor]:
        """The parameter's state, which is created if there is none."""


Dtype = torch.dtype
_READ = operator.itemgetter("step", "exp_avg", "exp_avg_sq")


class Kinds(NamedTuple):
    """The dtypes of a weight, its gradient and its moments."""

    weight: Dtype
    gradient: Dtype
    moment: Dtype


def describe_group(group: Group) -> list[float]:
    """A group's settings, as ``kernel.advance`` reads them."""
    beta1, beta2 = (ctypes.c_float(beta).value for beta in group["betas"])  # rounded, as torch does
    decay = group["weight_decay"]
    is_decoupled = group.get("decoupled_weight_decay", True)
    logarithms = [math.log(beta) if beta > 0 else -math.inf for beta in (beta1, beta2)]
    decays = [decay, 0.0] if is_decoupled else [0.0, decay]
    return [float(group["lr"]), beta1, beta2, *logarithms, group["eps"], *decays]


@dataclass
class _Family:
    """Parameters with the same dtypes: they are updated by one launch."""

    kinds: Kinds
    numbers: list[int]
    """Which of the launch's parameters these are."""
    chunks: Tensor
    groups: Tensor
    values: Tensor
    """What ``advance`` computes for ``update``."""
    rows: Mirror
    steps: Mirror
    gradients: Addresses


class Launch:
    """The update of the parameters that have a gradient; a CUDA graph of it must keep it."""

    def __init__(
        self, source: Source, parameters: Sequence[nn.Parameter], kinds: Sequence[Dtype | None]
    ) -> None:
        """``kinds`` are the dtypes of all parameters' gradients; None: there is no gradient."""
        has_gradient = [kind is not None for kind in kinds]
        self.parameters = list(itertools.compress(parameters, has_gradient))
        self.device = self.parameters[0].device
        self._source = source
        self._all_parameters, self._gradient_kinds = list(parameters), list(kinds)
        self._layout = _count_parameters(source)
        self.is_sharded = any(isinstance(p, DTensor) for p in self.parameters)
        self._states = [source.get_state(p) for p in self.parameters]
        self._all_states = list(source.state.values())
        self._held = list(_list_tensors(self._states))
        self._sizes = [get_shard(p).numel() for p in self.parameters]
        numbers = [i for i, group in enumerate(source.param_groups) for _ in group["params"]]
        self._families = self._build_families(
            list(itertools.compress(numbers, has_gradient)),
            list(itertools.compress(kinds, has_gradient)),
        )
        self._addresses: list[int] = []
        self._settings = Mirror(torch.float64, self.device)
        self._no_flag = torch.zeros((), device=self.device)
        self._no_divisor = torch.ones((), device=self.device)

    def _build_families(self, groups: list[int], kinds: list[Any]) -> list[_Family]:
        members: dict[Kinds, list[int]] = defaultdict(list)
        for number, state in enumerate(self._states):
            weight, moment = self.parameters[number].dtype, state["exp_avg"].dtype
            members[Kinds(weight, kinds[number], moment)].append(number)
        return [
            _Family(
                dtypes,
                numbers,
                chunks=send(build_chunks([self._sizes[i] for i in numbers], CHUNK), self.device),
                groups=send(torch.tensor([groups[i] for i in numbers], device=HOST), self.device),
                values=torch.empty(len(numbers), NUMBERS, device=self.device),
                rows=Mirror(torch.int64, self.device),
                steps=Mirror(torch.int64, self.device),
                gradients=Addresses(self.device),
            )
            for dtypes, numbers in members.items()
        ]

    def fits(self, parameters: Sequence[nn.Parameter], kinds: Sequence[Dtype | None]) -> bool:
        """Whether the launch updates these parameters from gradients of these dtypes."""
        return (
            kinds == self._gradient_kinds
            and all(map(operator.is_, parameters, self._all_parameters))
            and _count_parameters(self._source) == self._layout
        )

    @torch.no_grad()
    def prepare(self) -> bool:
        """The host's part of a step, before each ``run`` or replay; False if it no longer fits."""
        if not self._has_same_state() or _count_parameters(self._source) != self._layout:
            return False
        weights, held = self._get_shards(self.parameters), self._get_shards(self._held)
        addresses = list(map(Tensor.data_ptr, [*weights, *held]))
        if addresses != self._addresses:
            if not self._still_fits(weights, held):
                return False
            self._write_addresses(addresses)
            self._addresses = addresses
        groups = self._source.param_groups
        self._settings.write([number for group in groups for number in describe_group(group)])
        increment_version(self.parameters)
        if self.is_sharded:
            increment_version(weights)
        return True

    def _has_same_state(self) -> bool:
        """Whether the optimizer's state consists of the same tensors as before."""
        state = self._source.state
        return (
            len(state) == len(self._all_states)
            and all(map(operator.is_, state.values(), self._all_states))
            and all(map(operator.is_, _list_tensors(self._states), self._held))
        )

    def _still_fits(self, weights: list[Tensor], held: list[Tensor]) -> bool:
        """Whether tensors that moved are still where and what they must be."""
        rows = zip(weights, held[::3], held[1::3], held[2::3], self._sizes, strict=True)
        kinds = {i: family.kinds for family in self._families for i in family.numbers}
        return all(
            _is_whole(weight, self.device, kinds[i].weight, size)
            and _is_whole(step, self.device, torch.float32, 1)
            and _is_whole(mean, self.device, kinds[i].moment, size)
            and _is_whole(square, self.device, kinds[i].moment, size)
            for i, (weight, step, mean, square, size) in enumerate(rows)
        )

    def _write_addresses(self, addresses: list[int]) -> None:
        count = len(self.parameters)
        weights, held = addresses[:count], addresses[count:]
        steps, means, squares = held[::3], held[1::3], held[2::3]
        rows = list(zip(weights, means, squares, self._sizes, strict=True))
        for family in self._families:
            family.rows.write([number for i in family.numbers for number in rows[i]])
            family.steps.write([steps[i] for i in family.numbers])

    def _get_shards(self, tensors: Sequence[Any]) -> list[Tensor]:
        return list_local(tensors) if self.is_sharded else list(tensors)

    @torch.no_grad()
    def run(
        self,
        divisor: Tensor | None = None,
        flag: Tensor | None = None,
        gradients: Sequence[Tensor] | None = None,
    ) -> None:
        """The device's part of a step, which can be recorded."""
        if gradients is None:
            gradients = [gradient for p in self.parameters if (gradient := p.grad) is not None]
        addresses = list(map(Tensor.data_ptr, self._get_shards(gradients)))
        divisor = self._no_divisor if divisor is None else divisor
        flag = self._no_flag if flag is None else flag
        with on_device(self.device):
            for family in self._families:
                table = family.gradients.write([addresses[i] for i in family.numbers])
                self._run_family(family, table, divisor, flag)

    def _run_family(
        self, family: _Family, gradients: Tensor, divisor: Tensor, flag: Tensor
    ) -> None:
        from rapidformer.optim.multi_tensor import kernel

        count, kinds = len(family.numbers), family.kinds
        kernel.advance[(-(-count // _TENSORS_AT_ONCE),)](
            family.steps.tensor, family.groups, self._settings.tensor, family.values, flag, count,
            _TENSORS_AT_ONCE,
        )  # fmt: skip
        if not len(family.chunks):
            return  # all of this rank's shards are empty
        kernel.update[(len(family.chunks),)](
            family.chunks, family.rows.tensor, gradients, family.values, divisor, flag,
            kernel.TYPES[kinds.weight], kernel.TYPES[kinds.gradient], kernel.TYPES[kinds.moment],
            self._source.rounds_randomly and kinds.moment == torch.bfloat16, CHUNK, BLOCK,
            num_warps=WARPS,
        )  # fmt: skip


def _list_tensors(states: Sequence[dict[str, Tensor]]) -> Iterable[Tensor]:
    """The step and the two moments of each parameter."""
    return itertools.chain.from_iterable(map(_READ, states))


def _count_parameters(source: Source) -> list[int]:
    return [len(group["params"]) for group in source.param_groups]


def _is_whole(tensor: Tensor, device: torch.device, dtype: Dtype, size: int) -> bool:
    is_alike = tensor.device == device and tensor.dtype == dtype and tensor.numel() == size
    return is_alike and tensor.is_contiguous()


_AT_ONCE = 64
"""How many addresses one launch writes while a graph is recorded."""


class Addresses:
    """The addresses of tensors that may move from step to step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mirror = Mirror(torch.int64, device)

    def write(self, addresses: list[int]) -> Tensor:
        """A table of the addresses. A recorded graph fills its own table."""
        if not is_recording(self._device):
            self._mirror.write(addresses)
            return self._mirror.tensor
        return record_addresses(addresses, self._device)


def record_addresses(addresses: list[int], device: torch.device) -> Tensor:
    """Write a table by launches that have the addresses as arguments."""
    from rapidformer.optim.multi_tensor import kernel

    # Triton would compile again for the 0 of an empty tensor.
    known = [address or max(addresses) for address in addresses]
    padded = known + known[-1:] * (-len(known) % _AT_ONCE)
    table = torch.empty(len(padded), dtype=torch.int64, device=device)
    for start in range(0, len(padded), _AT_ONCE):
        some = tuple(address + 1 for address in padded[start : start + _AT_ONCE])
        kernel.write_addresses[(1,)](table[start:], some)
    return table
