"""torch's pipeline schedules on our stages, for micro-batches of any shape.

torch fixes the shapes between stages at the first step. Here a stage asks, before each receive,
what shape its input will have. The tensors passed through ``step`` are only the *numbers* of micro-
batches; the micro-batches themselves are on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from rapidformer.accel.pipeline.layout import Layout, Stage
from rapidformer.log import warn_once

RunStage = Callable[[Stage, int, Tensor | None], Tensor]
"""A stage's forward pass for the micro-batch of that number; returns its output, or the loss."""


@dataclass(frozen=True)
class Wires:
    """How hidden states travel between stages."""

    device: torch.device
    group: dist.ProcessGroup
    dtype: torch.dtype
    get_shape: Callable[[int, int], torch.Size]
    """From the numbers of a stage and a micro-batch to the shape of its input."""


class StageModule(nn.Module):
    """What torch takes for a stage's module: it has the model's parameters, and no hooks."""

    def __init__(self, stage: Stage, run: RunStage, parameters: Callable[[], Any]) -> None:
        super().__init__()
        self.stage = stage
        self._run = run
        self._get_parameters = parameters
        self.outputs: dict[int, tuple[torch.Size, torch.dtype]] = {}
        """Of each micro-batch: what its gradient will look like."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """All of the model's on this rank: zero-bubble picks those of the stage itself."""
        return (p for p in self._get_parameters() if p.requires_grad)

    def forward(self, hidden: Tensor, number: Tensor) -> Tensor:
        output = self._run(self.stage, int(number), None if self.stage.is_first else hidden)
        self.outputs[int(number)] = output.shape, output.dtype
        return output


class _FlexibleStage(PipelineStage):
    """A stage whose input may have another shape in each micro-batch."""

    def __init__(self, module: StageModule, num_stages: int, wires: Wires) -> None:
        # Given here so that torch does not run the model to find out; replaced before each receive.
        empty = torch.zeros(1, dtype=wires.dtype, device=wires.device, requires_grad=True)
        place = module.stage.index, num_stages, wires.device
        super().__init__(module, *place, input_args=empty, output_args=empty, group=wires.group)
        self._outputs, self._wires = module.outputs, wires

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        operations = super().get_fwd_recv_ops(fwd_chunk_id)
        if not self.is_first:
            shape, dtype = self._wires.get_shape(self.stage_index, fwd_chunk_id), self._wires.dtype
            buffer = torch.empty(shape, dtype=dtype, device=self.device, requires_grad=True)
            _receive_into(buffer, self.args_recv_info[fwd_chunk_id], operations)
        return operations

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        operations = super().get_bwd_recv_ops(bwd_chunk_id)
        if self.has_backward and not self.is_last:
            shape, dtype = self._outputs[bwd_chunk_id]
            buffer = torch.empty(shape, dtype=dtype, device=self.device)
            _receive_into(buffer, self.grad_recv_info[bwd_chunk_id], operations)
        return operations

    # ---- torch 2.11 ----------------------------------------------------------------------------

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Shapes are checked where a stage is entered."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """The same: torch knows only the placeholder's shape."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # A rank with two neighbouring stages would send to itself, which gloo cannot.
        operations = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.peer != dist.get_rank()]


def _receive_into(buffer: Tensor, infos: Any, operations: list[dist.P2POp]) -> None:
    """Afterwards, not before: torch 2.15 refuses a receive whose buffer is set."""
    (info,), (operation,) = infos, operations
    info.buffer = operation.tensor = buffer


class ScheduledSteps:
    """One schedule for this many micro-batches; rebuilt when their number changes."""

    def __init__(
        self, layout: Layout, modules: list[StageModule], count: int, wires: Wires
    ) -> None:
        self.count = count
        self._stages = [module.stage for module in modules]
        flexible = [_FlexibleStage(module, len(layout.stages), wires) for module in modules]
        kind = choose_kind(layout, count)
        stages = flexible[0] if kind in (ScheduleGPipe, Schedule1F1B) else flexible
        # The last stage's output is already the loss.
        options = {"loss_fn": lambda output, target: output, "scale_grads": False}
        self._schedule: Any = kind(stages, count, **options)

    def run(self) -> None:
        """Forward and backward of all micro-batches."""
        numbers = torch.arange(self.count)
        inputs = [numbers] if any(stage.is_first for stage in self._stages) else []
        is_last = any(stage.is_last for stage in self._stages)
        last: dict[str, Any] = {"target": numbers, "losses": []} if is_last else {}
        self._schedule.step(*inputs, number=numbers, return_outputs=False, **last)


def choose_kind(layout: Layout, count: int) -> type:
    """torch's class for the schedule; a different one if there are too few micro-batches for it."""
    processes = layout.num_processes
    if layout.schedule == "zero-bubble":
        return ScheduleZBVZeroBubble
    if layout.schedule == "interleaved":
        if count % max(1, count // processes) == 0:
            return ScheduleInterleaved1F1B
        # The micro-batches do not divide into equal rounds: all forward passes come first.
        warn_once(
            f"--pipeline-schedule interleaved: {count} micro-batches per step do not divide into "
            f"equal rounds of {processes} or more, so such a step runs all forward passes first, "
            f"which takes more memory. Use a multiple of {processes} (--global-batch-size)."
        )
        return ScheduleLoopedBFS
    if layout.schedule == "1f1b" and count >= processes:
        return Schedule1F1B
    if layout.schedule == "1f1b":
        warn_once(
            f"--pipeline-schedule 1f1b: a step of {count} micro-batch{'es' * (count > 1)} leaves "
            f"some of the {processes} ranks idle (gpipe's order is used). Use {processes} or more "
            "micro-batches (--global-batch-size, --micro-batch-size) to keep all busy."
        )
    return ScheduleGPipe
