"""One AdamW update of a set of parameters: its tables on the device, and its launches.

The arithmetic is fp32, in the order of torch's fused AdamW. Bias corrections, rates and the like
are computed in fp64 and rounded once. Quotients and roots are rounded as IEEE says. torch's fused
AdamW computes moments in fp64 or rounds the betas to fp32 first, depending on its version: weights
agree with either up to the last bits.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from rapidformer.optim.multi_tensor.addresses import Addresses
from rapidformer.optim.multi_tensor.tables import NUMBERS, Mirror, build_chunks, send

CHUNK, BLOCK, WARPS = 8192, 2048, 4
_TENSORS_AT_ONCE = 128

Group = dict[str, Any]


class Source(Protocol):
    """The optimizer, as a launch sees it."""

    param_groups: list[Group]
    rounds_randomly: bool
    """Whether moments in bf16 are rounded up or down at random instead of to the nearest."""

    def get_state(self, parameter: Any) -> dict[str, Tensor]:
        """The parameter's state, which is created if there is none."""


class Kinds(NamedTuple):
    """The dtypes of a weight, its gradient and its moments."""

    weight: torch.dtype
    gradient: torch.dtype
    moment: torch.dtype


def get_local(tensor: Tensor) -> Tensor:
    """A sharded tensor's shard on this rank; call it without grad mode."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def describe_group(group: Group) -> list[float]:
    """A group's settings, as ``kernel.advance`` reads them."""
    beta1, beta2 = group["betas"]
    decay = group["weight_decay"]
    is_decoupled = group.get("decoupled_weight_decay", True)
    return [
        float(group["lr"]),
        beta1,
        beta2,
        math.log(beta1) if beta1 > 0 else -math.inf,
        math.log(beta2) if beta2 > 0 else -math.inf,
        group["eps"],
        decay if is_decoupled else 0.0,
        0.0 if is_decoupled else decay,
    ]


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
    """The update of a set of parameters; a CUDA graph that recorded it must keep it."""

    def __init__(
        self,
        source: Source,
        parameters: Sequence[nn.Parameter],
        group_numbers: Sequence[int],
        gradients: Sequence[Tensor],
    ) -> None:
        self.parameters = list(parameters)
        self.device = parameters[0].device
        self._source = source
        self._group_numbers = list(group_numbers)
        self._group_count = len(source.param_groups)
        self._is_sharded = any(isinstance(p, DTensor) for p in parameters)
        self._sizes = [get_local(p).numel() for p in parameters]
        self._weight_kinds = [p.dtype for p in parameters]
        self._gradient_kinds = [g.dtype for g in gradients]
        self._moment_kinds = [source.get_state(p)["exp_avg"].dtype for p in parameters]
        self._families = self._build_families()
        self._addresses: list[list[int]] = []
        self._settings = Mirror(torch.float64, self.device)
        self._no_flag = torch.zeros((), device=self.device)
        self._no_divisor = torch.ones((), device=self.device)

    def _build_families(self) -> list[_Family]:
        members: dict[Kinds, list[int]] = defaultdict(list)
        every = zip(self._weight_kinds, self._gradient_kinds, self._moment_kinds, strict=True)
        for number, kinds in enumerate(map(Kinds._make, every)):
            members[kinds].append(number)
        return [self._build_family(kinds, numbers) for kinds, numbers in members.items()]

    def _build_family(self, kinds: Kinds, numbers: list[int]) -> _Family:
        device = self.device
        groups = torch.tensor([self._group_numbers[i] for i in numbers], dtype=torch.int32)
        return _Family(
            kinds,
            numbers,
            chunks=send(build_chunks([self._sizes[i] for i in numbers], CHUNK), device),
            groups=send(groups, device),
            values=torch.empty(len(numbers), NUMBERS, device=device),
            rows=Mirror(torch.int64, device),
            steps=Mirror(torch.int64, device),
            gradients=Addresses(device),
        )

    def fits(
        self,
        parameters: Sequence[nn.Parameter],
        group_numbers: Sequence[int],
        gradients: Sequence[Tensor],
    ) -> bool:
        """Whether the launch updates these parameters from gradients of these dtypes."""
        return (
            len(parameters) == len(self.parameters)
            and all(map(operator.is_, parameters, self.parameters))
            and group_numbers == self._group_numbers
            and [gradient.dtype for gradient in gradients] == self._gradient_kinds
        )

    @torch.no_grad()
    def prepare(self) -> bool:
        """The host's part of a step: call it before every ``run`` or replay.

        False if the launch no longer fits the optimizer; nothing has happened then.
        """
        states = list(map(self._source.get_state, self.parameters))
        weights = self._get_local(self.parameters)
        means = self._get_local([state["exp_avg"] for state in states])
        squares = self._get_local([state["exp_avg_sq"] for state in states])
        steps = [state["step"] for state in states]
        every = (weights, means, squares, steps)
        addresses = [list(map(Tensor.data_ptr, tensors)) for tensors in every]
        if addresses != self._addresses:
            if not self._still_fits(*every):
                return False
            self._write_addresses(addresses)
        groups = self._source.param_groups
        if len(groups) != self._group_count:
            return False
        self._settings.write([number for group in groups for number in describe_group(group)])
        increment_version([*self.parameters, *means, *squares])
        if self._is_sharded:
            increment_version(weights)
        return True

    def _write_addresses(self, addresses: list[list[int]]) -> None:
        *columns, steps = addresses
        rows = list(zip(*columns, self._sizes, strict=True))
        for family in self._families:
            family.rows.write([number for i in family.numbers for number in rows[i]])
            family.steps.write([steps[i] for i in family.numbers])
        self._addresses = addresses

    def _get_local(self, tensors: Sequence[Any]) -> list[Tensor]:
        return list(map(get_local, tensors) if self._is_sharded else tensors)

    def _still_fits(
        self,
        weights: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
        steps: list[Tensor],
    ) -> bool:
        """Whether tensors that moved have kept their size, dtype and device."""
        kinds = self._weight_kinds, self._moment_kinds, self._moment_kinds
        return all(step.device == self.device for step in steps) and all(
            [tensor.numel() for tensor in tensors] == self._sizes
            and [tensor.dtype for tensor in tensors] == own
            and all(tensor.device == self.device for tensor in tensors)
            and all(map(Tensor.is_contiguous, tensors))
            for tensors, own in zip((weights, means, squares), kinds, strict=True)
        )

    @torch.no_grad()
    def run(
        self,
        divisor: Tensor | None = None,
        flag: Tensor | None = None,
        gradients: Sequence[Tensor] | None = None,
    ) -> None:
        """The device's part of a step, which can be recorded."""
        local = self._get_local(
            [p.grad for p in self.parameters] if gradients is None else gradients
        )
        divisor = self._no_divisor if divisor is None else divisor
        flag = self._no_flag if flag is None else flag
        with self._on_device():
            for family in self._families:
                addresses = [local[i].data_ptr() for i in family.numbers]
                self._run_family(family, family.gradients.write(addresses), divisor, flag)

    def _on_device(self) -> AbstractContextManager[Any]:
        # Triton launches on the current device, whatever tensors it is given.
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _run_family(
        self, family: _Family, gradients: Tensor, divisor: Tensor, flag: Tensor
    ) -> None:
        from rapidformer.optim.multi_tensor import kernel

        count, kinds = len(family.numbers), family.kinds
        kernel.advance[(-(-count // _TENSORS_AT_ONCE),)](
            family.steps.tensor, family.groups, self._settings.tensor, family.values, flag, count,
            _TENSORS_AT_ONCE,
        )  # fmt: skip
        kernel.update[(len(family.chunks),)](
            family.chunks, family.rows.tensor, gradients, family.values, divisor, flag,
            kernel.TYPES[kinds.weight], kernel.TYPES[kinds.gradient], kernel.TYPES[kinds.moment],
            self._source.rounds_randomly and kinds.moment == torch.bfloat16, CHUNK, BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
