"""Weights and optimizer state that DeepSpeed has cut into flat shards, whole and by name.

A checkpoint stores them as a run without DeepSpeed would, so it resumes under any stage, on any
number of ranks. Tensors are joined one at a time. DeepSpeed holds every weight twice (fp32 shards
for the update, and the weight the model computes with), so a restored one must be put into both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from rapidformer.accel.tensor.slices import cut_slice, find_slice, join_slice
from rapidformer.compat.deepspeed import get_piece, link_optimizer_state, step_group

_PART_BYTES = 2**28
"""Tensors are read back in parts of about this size."""


class Started(Protocol):
    """A model that DeepSpeed has taken over, as far as its state is concerned."""

    deepspeed: Any
    engine: Any
    model: nn.Module
    device: torch.device
    stage: int
    bypass: Callable[[], AbstractContextManager[None]]
    """A context manager inside which the optimizer steps at once."""


class GatheredState:
    """The tensors of a run under DeepSpeed, whole, under the names of a run without it."""

    def __init__(self, strategy: Started) -> None:
        self._strategy = strategy

    # ---- to disk ---------------------------------------------------------------------------------

    def collect(
        self, *, with_optimizer: bool
    ) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]] | None]:
        """This rank's part of the joined tensors, in host memory; every rank must call this."""
        tensors: dict[str, torch.Tensor] = {}
        rank, world_size = dist.get_rank(), dist.get_world_size()
        keys = self._get_keys() if with_optimizer else []
        for turn, (names, parameter) in enumerate(self._iterate_parameters()):
            is_mine = turn % world_size == rank
            weight = self._gather_weight(parameter)
            if is_mine:
                tensors |= {f"model.{name}": weight.cpu().clone() for name in names}
            for key in keys if parameter.requires_grad else []:
                value = self._gather(parameter, key)
                if is_mine:
                    tensors[f"optimizer.{names[0]}.{key}"] = value.cpu().clone()
        if rank == 0:
            tensors |= {f"model.{name}": b.cpu() for name, b in self._get_buffers().items()}
        groups = self._strategy.engine.basic_optimizer.param_groups
        plain = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        return tensors, plain if with_optimizer else None

    def gather_weights(self) -> dict[str, torch.Tensor]:
        """The model's weights on the first rank; every rank must call this."""
        weights: dict[str, torch.Tensor] = {}
        for names, parameter in self._iterate_parameters():
            weight = self._gather_model_weight(parameter)
            if dist.get_rank() == 0:
                weights |= dict.fromkeys(names, weight.cpu().clone())
        return weights | {name: b.cpu() for name, b in self._get_buffers().items()}

    def iterate_frozen(self) -> Iterator[tuple[list[str], torch.Tensor]]:
        """Every frozen weight, whole, with all of its names; every rank must call this."""
        for names, parameter in self._iterate_parameters():
            if not parameter.requires_grad:
                yield names, self._gather_model_weight(parameter)

    # ---- from disk -------------------------------------------------------------------------------

    def get_wanted(self, *, with_optimizer: bool) -> dict[str, torch.Tensor]:
        """Names and whole shapes of everything to restore, without memory."""
        if with_optimizer:
            self._fill_state()
        keys = self._get_keys() if with_optimizer else []
        wanted: dict[str, torch.Tensor] = {}
        for names, parameter in self._iterate_parameters():
            shape = _get_whole_shape(parameter)
            wanted |= {f"model.{n}": torch.empty(shape, device="meta") for n in names}
            for key in keys if parameter.requires_grad else []:
                size = () if self._is_number(key) else shape
                wanted[f"optimizer.{names[0]}.{key}"] = torch.empty(size, device="meta")
        for name, buffer in self._get_buffers().items():
            wanted[f"model.{name}"] = torch.empty_like(buffer, device="meta")
        return wanted

    def iterate_parts(self, wanted: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        """Tensors to fill and then pass to ``put``, a few at a time."""
        part: dict[str, torch.Tensor] = {}
        for name, tensor in wanted.items():
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            part[name] = torch.empty(tensor.shape, dtype=dtype)
            if sum(t.nbytes for t in part.values()) >= _PART_BYTES:
                yield part
                part = {}
        yield part

    def put(self, tensors: dict[str, torch.Tensor]) -> None:
        """Split whole tensors into their shards; every rank must call this."""
        for names, parameter in self._iterate_parameters():
            if (weight := tensors.get(f"model.{names[0]}")) is not None:
                self._put_weight(parameter, weight)
            prefix = f"optimizer.{names[0]}."
            for name, value in tensors.items():
                if name.startswith(prefix):
                    self._put(parameter, name.removeprefix(prefix), value)
        for name, buffer in self._get_buffers().items():
            if f"model.{name}" in tensors:
                buffer.copy_(tensors[f"model.{name}"])

    def _iterate_parameters(self) -> Iterator[tuple[list[str], nn.Parameter]]:
        """Every parameter once, with all of its names."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self._strategy.model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        return ((names_of, parameter) for parameter, names_of in names.items())

    def _get_buffers(self) -> dict[str, torch.Tensor]:
        parameters = {n for n, _ in self._strategy.model.named_parameters(remove_duplicate=False)}
        return {
            name: tensor
            for name, tensor in self._strategy.model.state_dict().items()
            if name not in parameters and isinstance(tensor, torch.Tensor)
        }

    def _get_pieces(self) -> list[torch.Tensor]:
        """The parameters that have optimizer state."""
        is_third = self._strategy.stage == 3
        name = "fp32_partitioned_groups_flat" if is_third else "single_partition_of_fp32_groups"
        return list(getattr(self._strategy.engine.optimizer, name))

    def _get_keys(self) -> list[str]:
        """The names of the optimizer's tensors, equal for all parameters; none before first use."""
        state = self._strategy.engine.basic_optimizer.state
        first: dict[str, Any] = next(filter(None, map(state.get, self._get_pieces())), {})
        return [key for key, value in first.items() if isinstance(value, torch.Tensor)]

    def _is_number(self, key: str) -> bool:
        state = self._strategy.engine.basic_optimizer.state
        return any(state[p][key].dim() == 0 for p in self._get_pieces() if key in state.get(p, {}))

    def _gather_weight(self, parameter: nn.Parameter) -> torch.Tensor:
        """The fp32 weight that updates apply to."""
        if not parameter.requires_grad:
            return self._gather_model_weight(parameter)
        from deepspeed.utils import safe_get_full_fp32_param

        return join_tensor_split(parameter, safe_get_full_fp32_param(parameter))

    def _gather_model_weight(self, parameter: nn.Parameter) -> torch.Tensor:
        """The weight that the model computes with."""
        if self._strategy.stage < 3:
            return join_tensor_split(parameter, parameter.detach())
        with self._strategy.deepspeed.zero.GatheredParameters([parameter]):
            return join_tensor_split(parameter, parameter.detach().clone())

    def _gather(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """A tensor of the optimizer's state; a number (the update count) is the same for all."""
        state = self._strategy.engine.basic_optimizer.state
        if self._is_number(key):
            return state[self._get_pieces()[0]][key]
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_state()
        return join_tensor_split(parameter, safe_get_full_optimizer_state(parameter, key))

    def _link_state(self) -> None:
        """Make DeepSpeed find its state again: it looks after the first group's first step."""
        if self._strategy.stage < 3:
            link_optimizer_state(self._strategy.engine.optimizer)

    def _put_weight(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        part = _cut_tensor_split(parameter, weight.to(self._strategy.device))
        if self._strategy.stage < 3:
            parameter.data.copy_(part)
        else:
            with self._strategy.deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(part)
        if parameter.requires_grad:
            self._put_piece(parameter, None, part)

    def _put(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        state = self._strategy.engine.basic_optimizer.state
        if value.dim() == 0:
            for piece in self._get_pieces():
                state[piece][key].copy_(value)
            return
        part = _cut_tensor_split(parameter, value.to(self._strategy.device))
        self._put_piece(parameter, key, part)

    def _put_piece(self, parameter: Any, key: str | None, whole: torch.Tensor) -> None:
        if self._strategy.stage < 3:
            if key is not None:
                self._link_state()
            parameter.set_full_hp_param(whole, key)
            return
        # Not `safe_set_full_fp32_param`: it fails on a shard that is partly padding.
        piece, place = get_piece(self._strategy.engine.optimizer, parameter, key)
        start = piece.numel() * place
        mine = whole.flatten()[start : start + piece.numel()]
        piece.data[: mine.numel()].copy_(mine)

    def _fill_state(self) -> None:
        """Make the optimizer create its tensors, by a step at rate 0 on zero gradients."""
        strategy = self._strategy
        optimizer = strategy.engine.basic_optimizer
        if optimizer.state:
            return
        rates = [(group, group["lr"]) for group in optimizer.param_groups]
        gradients = [(piece, piece.grad) for piece in self._get_pieces()]
        for group, _ in rates:
            group["lr"] = 0.0
        for piece, _ in gradients:
            piece.grad = torch.zeros_like(piece)
        with strategy.bypass(), torch.no_grad():
            for index in range(len(gradients)):
                step_group(strategy.engine.optimizer, index)
        for piece, gradient in gradients:
            piece.grad = gradient
        for group, rate in rates:
            group["lr"] = rate


def _get_whole_shape(parameter: Any) -> torch.Size:
    known = find_slice(parameter)
    return known.shape if known else torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def join_tensor_split(parameter: Any, own: torch.Tensor) -> torch.Tensor:
    """The whole of a weight (or of its gradient or state), from this rank's slice."""
    known = find_slice(parameter)
    return own if known is None else join_slice(known, own)


def _cut_tensor_split(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    """This rank's slice of it."""
    known = find_slice(parameter)
    return whole if known is None else cut_slice(known, whole)
