"""Backward passes: from a mean loss to the gradient of its update's mean.

Every micro-batch back-propagates a sum. After the last one of an update, gradients are summed over
the ranks and divided once, by the weight of the global batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rapidformer.accel.attention.kernel_scope import use_kernels
from rapidformer.accel.parallelize import Parallelized
from rapidformer.accel.tensor.slices import check_whole_gradients
from rapidformer.accel.tensor.vocabulary_loss import join_loss
from rapidformer.accel.unpad.on_demand import settle
from rapidformer.data.update import MicroBatch, MicroBatchResult
from rapidformer.dist.heartbeat import beat
from rapidformer.dist.topology import Topology
from rapidformer.engine.in_batch import warn_if_rows_are_compared, warn_of_other_weight
from rapidformer.engine.weights import LossWeights
from rapidformer.errors import ModelError, RapidformerError
from rapidformer.log import warn_once
from rapidformer.optim.gradients import HeldGradients, add_gradients, scale_loss, take_gradients
from rapidformer.optim.guard import LossScaler
from rapidformer.optim.observer import get_observer
from rapidformer.optim.update import MeasureNorm, UpdateClock
from rapidformer.overlay import get_own_class


def join(loss: torch.Tensor) -> torch.Tensor:
    """The loss as a plain tensor; one that cannot be back-propagated is refused."""
    joined = join_loss(loss)
    if isinstance(joined, DTensor):
        raise ModelError(
            "the loss contains weights that are split over ranks (a penalty over "
            "model.parameters(), say). Gather each of them in the loss: "
            "sum(engine.model.gather_weight(p).pow(2).sum() for p in model.parameters())."
        )
    return joined


@dataclass
class StartedMicroBatch:
    """The micro-batch whose forward step runs."""

    micro_batch: MicroBatch
    has_run: bool = False
    """Whether the step has run a backward pass itself."""
    is_last: bool = False
    fraction: float | torch.Tensor = 0.0


@dataclass(eq=False)
class BackwardPasses:
    """Back-propagates losses and finishes gradients."""

    parallelized: Parallelized
    parameters: Sequence[nn.Parameter]
    optimizer: Optimizer
    topology: Topology
    clock: UpdateClock
    weights: LossWeights
    scaler: LossScaler | None
    started: StartedMicroBatch | None = None
    """The micro-batch whose forward step runs, for ``run_within``."""

    def __post_init__(self) -> None:
        self._trainable = [p.requires_grad for p in self.parameters]
        self._num_held = sum(len(group["params"]) for group in self.optimizer.param_groups)
        self._held: HeldGradients | None = None
        """What the micro-batches of this update have added up to so far."""
        self._joined: MicroBatch | None = None
        """The last micro-batch whose loss has reached this model."""

    def run(
        self,
        result: MicroBatchResult,
        micro_batch: MicroBatch | None,
        *,
        ends_update: bool,
        retain_graph: bool = False,
    ) -> None:
        """Back-propagate a micro-batch's loss; finish the gradient after the last of its update."""
        follows = self.clock.is_accumulating
        is_last, fraction = self.count(result, micro_batch, ends_update=ends_update)
        if self.topology.data > 1 or follows or not is_last:
            warn_if_rows_are_compared(result.loss, self.clock.updates)
            if not result.is_weight_given and self.topology.context == 1:
                warn_of_other_weight(result.loss, result.weight, self.clock.updates)
        self._back_propagate(result.loss, fraction, is_last=is_last, retain_graph=retain_graph)
        if is_last:
            beat("update")
            self.finish()

    def count(
        self, result: MicroBatchResult, micro_batch: MicroBatch | None, *, ends_update: bool = False
    ) -> tuple[bool, float | torch.Tensor]:
        """Whether it is the last one of its update, and its fraction of the update."""
        self._release()
        info = micro_batch.info if micro_batch is not None else None
        weight = result.weight
        get_observer().see_loss(result.loss, weight, info, is_given=result.is_weight_given)
        is_last = self.clock.start_micro_batch(ends_update=ends_update)
        unit = self.weights.get_shared_unit(weight)
        return is_last, self.clock.add_weight(weight, shared_unit=unit)

    def _release(self) -> None:
        self.adopt_added()
        if self._held is not None:
            self._held.put_back()
            self._held = None

    @contextmanager
    def joining(
        self, result: MicroBatchResult, micro_batch: MicroBatch | None, unit: float, *, counts: bool
    ) -> Iterator[list[nn.Parameter]]:
        """A backward pass that several engines share; yields what it will have reached of this one.

        Whether it reaches a model shows only afterwards: ranks exchange gradients in every pass.
        """
        synchronizer, is_accumulating = self.parallelized.synchronizer, self.clock.is_accumulating
        self._release()
        earlier = take_gradients(self.parameters)
        synchronizer.before_backward(True)
        reached: list[nn.Parameter] = []
        try:
            with use_kernels(self.parallelized.model):
                yield reached
        except BaseException:  # as if it had not begun: whoever catches this may go on
            take_gradients(self.parameters)
            add_gradients(self.parameters, earlier)
            raise
        synchronizer.after_backward()
        reached += [p for p in self.parameters if p.grad is not None]
        if reached:
            self._count_joined(result, micro_batch, unit, earlier, counts=counts)
        else:
            add_gradients(self.parameters, earlier)
            if is_accumulating:
                self._held = HeldGradients(self.parameters)

    def _count_joined(
        self,
        result: MicroBatchResult,
        micro_batch: MicroBatch | None,
        unit: float,
        earlier: Sequence[torch.Tensor | None],
        *,
        counts: bool,
    ) -> None:
        clock = self.clock
        if counts and micro_batch is not None and micro_batch is self._joined:
            raise RapidformerError(
                "a second loss of this micro-batch reaches "
                f"{get_own_class(self.parallelized.model).__name__} while gradients accumulate. "
                "Add both up for one backward(); or if the second is another model's, freeze this "
                "one meanwhile: model.requires_grad_(False)."
            )
        self._joined = micro_batch
        if clock.is_unused and not counts:
            clock.set_aside(())
        adds_up = clock.is_accumulating
        ends_update = micro_batch is not None and micro_batch.must_end
        is_last = clock.start_micro_batch(ends_update=ends_update) or not counts
        clock.add_loss(result.loss, clock.add_weight(result.weight, shared_unit=unit))
        if adds_up or not is_last:
            add_gradients(self.parameters, earlier)
        if not is_last:
            self._held = HeldGradients(self.parameters)
            return
        self.finish()
        if not adds_up:
            add_gradients(self.parameters, earlier)

    def _back_propagate(
        self,
        loss: torch.Tensor,
        fraction: float | torch.Tensor,
        *,
        is_last: bool,
        retain_graph: bool = False,
    ) -> None:
        joined = join(loss)
        scale = self.scaler.scale if self.scaler else 1.0
        synchronizer = self.parallelized.synchronizer
        beat("backward", self.clock.updates + 1)
        synchronizer.before_backward(is_last)
        scaled = scale_loss(joined, fraction, scale)
        self.parallelized.backward(scaled, retain_graph=retain_graph)
        synchronizer.after_backward()
        get_observer().see_phase("backward")
        self.clock.add_loss(loss, fraction)
        if not is_last and self.clock.keeper is None:
            model = self.parallelized.model
            # ZeRO-1 adds up gradients of gathered weights, which are the model's until the update.
            gathered = model.parameters() if isinstance(model, FSDPModule) else ()
            self._held = HeldGradients({*self.parameters, *gathered})

    def run_within(self, loss: torch.Tensor) -> None:
        """Back-propagate inside the forward step of an update; several losses add up."""
        started = self.started
        if started is None:
            raise RapidformerError("backward_within() is for the forward step of run_update().")
        loss = settle(loss)
        earlier: list[torch.Tensor | None] = []
        if not started.has_run:
            result = self.weights.weigh(loss, None, started.micro_batch)
            started.is_last, started.fraction = self.count(result, started.micro_batch)
            started.has_run = True
        elif started.is_last:
            # What is there has been summed over the ranks already.
            if self.parallelized.deepspeed is not None:
                raise RapidformerError(
                    "DeepSpeed takes one backward pass per micro-batch, and this step runs a "
                    "second one: use --zero-1-memory-optimization, -2- or -3- instead of a "
                    "DeepSpeed file."
                )
            earlier = take_gradients(self.parameters)
        self._back_propagate(loss, started.fraction, is_last=started.is_last)
        if earlier:
            add_gradients(self.parameters, earlier)

    def finish(self, measure: Callable[[MeasureNorm], torch.Tensor] | None = None) -> None:
        """Make the sums in ``.grad`` the update's gradient; ``measure`` asks other stages."""
        self.clock.finish_gradients(self.parameters, self.scaler, measure)
        has_changed = self.notice_unfrozen()
        group = self.topology.get_group("tensor")
        is_first = self.clock.updates == self.clock.first_update
        if group is not None and (has_changed or is_first):
            deepspeed = self.parallelized.deepspeed
            read = deepspeed.gather_gradient if deepspeed else operator.attrgetter("grad")
            check_whole_gradients(self.parallelized.model, group, read)

    def adopt_added(self) -> bool:
        """Take in parameters that the script has given the optimizer since; whether there are."""
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        if len(held) <= self._num_held:
            return False
        self._num_held = len(held)
        known = {id(p) for p in self.parameters}
        added = [p for p in held if id(p) not in known]
        if added and self.topology.mesh is not None:
            number = f"{len(added)} parameters" if added[1:] else "a parameter"
            raise RapidformerError(
                f"the optimizer was given {number} after compose(), whose gradient is that of this "
                "rank alone: ranks sum and split only what the model had in compose(). Add layers "
                "and adapters before it; or engine.close(), add them, and compose the model with a "
                "new engine and optimizer."
            )
        self.parameters = [*self.parameters, *added]
        self._trainable += [p.requires_grad for p in added]
        return bool(added)

    def notice_unfrozen(self) -> bool:
        """Whether parameters were frozen or unfrozen since the last update; warn of idle ones."""
        trainable = [p.requires_grad for p in self.parameters]
        if trainable == self._trainable:
            return False
        self._trainable = trainable
        if self.parallelized.deepspeed is not None:
            raise RapidformerError(
                "parameters were frozen or unfrozen after compose(), but DeepSpeed divides the "
                "trainable ones among the ranks when it starts: choose them before compose(), or "
                "use --zero-1-memory-optimization, -2- or -3- instead of a DeepSpeed file."
            )
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        idle = [p for p in self.parameters if p.requires_grad and id(p) not in held]
        if idle:
            number = f"{len(idle)} parameters were" if idle[1:] else "A parameter was"
            warn_once(
                f"{number} unfrozen after compose(), but the optimizer does not hold "
                f"{'them, so they are' if idle[1:] else 'it, so it is'} not updated. Pass "
                "compose() an optimizer over all parameters, frozen ones included: "
                "torch.optim.AdamW(model.parameters(), ...).",
                is_local=True,
            )
        return True
