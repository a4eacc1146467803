"""The passes of an update over inputs at fixed places in memory, and the update of the weights.

With the optimizer in a graph, gradients never leave it: only if nothing looks at them in between,
and if it reads all that changes from the device (``optim/multi_tensor``). On several ranks the
passes end with sums, which are exchanged outside (``finishing.py`` has the rest).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rapidformer.accel.cuda_graph.inputs import Inputs, NotRepeatableError, StaticInputs
from rapidformer.accel.data_parallel import GradientReducer
from rapidformer.accel.sharding.placed_weights import PlacedWeights
from rapidformer.compat.torch_tensors import copy_all, multiply_all
from rapidformer.data.update import Mean, MicroBatch, MicroBatchResult, Update
from rapidformer.optim.gradients import (
    clip_norm,
    get_divisor,
    get_norm,
    scale_loss,
    take_gradients,
)
from rapidformer.optim.multi_tensor.adamw import MultiTensorAdamW
from rapidformer.optim.multi_tensor.launch import Launch

RunForward = Callable[[MicroBatch], MicroBatchResult]
Exchange = GradientReducer | PlacedWeights


@dataclass(frozen=True)
class Outcome:
    """The results of an update's passes."""

    results: list[MicroBatchResult]
    gradients: list[Tensor | None] | None
    """Of all parameters: the mean over the update, not clipped yet; None: they were used."""
    norm: Tensor | None
    """None: they are sums over this rank's part of the update."""

    def copy(self, weights: Sequence[float]) -> Outcome:
        """A copy that the next replay does not overwrite, except for the gradients."""
        results = map(_copy_result, self.results, weights)
        norm = self.norm.clone() if self.norm is not None else None
        return Outcome(list(results), self.gradients, norm)

    def read(self) -> list[float]:
        """All numbers that must not depend on a replay; waits for the device."""
        numbers = [self.norm] if self.norm is not None else []
        for result in self.results:
            weight = result.weight if result.is_weight_given else 0.0
            numbers += [result.loss, torch.as_tensor(weight)]
            numbers += [mean for mean, _ in result.parts.values()]
        return [float(number) for number in numbers]


class GraphedUpdate:
    """How the optimizer uses a finished gradient inside a graph."""

    def __init__(self, optimizer: MultiTensorAdamW, max_norm: float, device: torch.device) -> None:
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._flag = torch.zeros((), device=device)
        """1.0 while nothing may change."""

    def find_launch(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]
    ) -> Launch | None:
        """The update with such gradients, ready to be recorded; None if it must run outside."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        try:
            launch = self._optimizer.find_launch()
        finally:
            take_gradients(parameters)
        known = {id(parameter) for parameter in parameters}
        if launch is None or not all(id(parameter) in known for parameter in launch.parameters):
            return None
        return launch if launch.prepare() else None

    def run(self, launch: Launch, gradients: dict[int, Tensor], norm: Tensor) -> None:
        """Clip and update; ``gradients`` by the ids of their parameters."""
        # As the optimizer does it outside, so that the bits are the same.
        used, divisor = [gradients[id(p)] for p in launch.parameters], None
        if launch.is_sharded:
            clip_norm(used, self._max_norm, norm.masked_fill(self._flag > 0, 0.0))
        elif self._max_norm > 0:
            divisor = get_divisor(norm, self._max_norm)
        launch.run(divisor, self._flag, used)

    @contextmanager
    def without_effect(self) -> Iterator[None]:
        """Inside, no update changes anything."""
        self._flag.fill_(1.0)
        try:
            yield
        finally:
            self._flag.fill_(0.0)


@dataclass(frozen=True)
class Request:
    """An update to run."""

    run_forward: RunForward
    update: Update
    weights: list[float]
    code: Hashable
    """All that the loss depends on besides its batch and the weights."""
    graphed_update: GraphedUpdate | None
    exchange: Exchange | None = None
    """What sums the gradients of several ranks afterwards."""

    def describe(self, inputs: list[Inputs]) -> Hashable:
        """The key of its graph, if these are its inputs."""
        return tuple(item.key for item in inputs), self.code, self.graphed_update is not None


class Passes:
    """Runs the passes on whatever was copied to their inputs."""

    def __init__(
        self,
        request: Request,
        inputs: Sequence[Inputs],
        parameters: Sequence[nn.Parameter],
        device: torch.device,
    ) -> None:
        self._request, self._parameters = request, parameters
        self._launch: Launch | None = None
        self._inputs = [StaticInputs(item, device) for item in inputs]
        self._weights = torch.empty(len(inputs) + 1, device=device)
        self._is_whole = len(inputs) == 1 and request.exchange is None
        """Whether a single micro-batch is all of the update."""
        self._fill_weights(request.weights)
        self.gradients: list[Tensor | None] | None = None
        """Where the gradients are left; None: wherever the backward pass puts them."""
        self.used: list[Tensor | None] | None = None
        """The gradients that the update in the graph has used, until they are compared."""

    @property
    def count(self) -> int:
        """Micro-batches of the update."""
        return len(self._inputs)

    @contextmanager
    def shifted(self) -> Iterator[None]:
        """Inside, the inputs are another batch."""
        with ExitStack() as stack:
            for static in self._inputs:
                stack.enter_context(static.shifted())
            yield

    def fill(self, inputs: Sequence[Inputs], weights: Sequence[float]) -> None:
        """Copy in another update with the same keys."""
        for static, item in zip(self._inputs, inputs, strict=True):
            static.fill(item)
        self._fill_weights(weights)

    def _fill_weights(self, weights: Sequence[float]) -> None:
        """Each micro-batch's fraction in units of the first, and what their sum is divided by."""
        if self._is_whole:
            return  # so nothing is multiplied
        unit = 1.0 if self._request.exchange is not None else weights[0]  # ranks share theirs
        fractions = [weight / unit for weight in weights]
        values = torch.tensor([*fractions, 1.0 / sum(fractions)], device="cpu")
        pinned = values.pin_memory() if self._weights.device.type == "cuda" else values
        self._weights.copy_(pinned, non_blocking=True)

    @property
    def updated(self) -> Sequence[nn.Parameter]:
        """The parameters that ``run`` updates; none if the optimizer runs afterwards."""
        return () if self._launch is None else self._launch.parameters

    def prepare(self) -> bool:
        """Call before every replay; False if it must be recorded again."""
        return self._launch is None or self._launch.prepare()

    def rehearse(self) -> Outcome:
        """Everything that ``run`` does on the device, once; no weight changes."""
        outcome, graphed = self.run_passes(), self._request.graphed_update
        if graphed is not None:
            assert outcome.gradients is not None
            self._launch = graphed.find_launch(self._parameters, outcome.gradients)
        with self.without_effect():
            self._finish(outcome)
        return outcome

    def run(self) -> Outcome:
        """What a graph records: the passes, and the update if it can be recorded.

        Sums are left where ranks exchange them.
        """
        return self._finish(self.run_passes())

    def _finish(self, outcome: Outcome) -> Outcome:
        assert outcome.gradients is not None
        if self._request.exchange is not None:
            pairs = zip(self._parameters, outcome.gradients, strict=True)
            placed = self._request.exchange.place({p: g for p, g in pairs if g is not None})
            return replace(outcome, gradients=[placed.get(p) for p in self._parameters])
        if self._launch is None:
            return replace(outcome, gradients=self._leave(outcome.gradients))
        assert outcome.norm is not None
        assert self._request.graphed_update is not None
        pairs = zip(self._parameters, outcome.gradients, strict=True)
        gradients = {id(parameter): grad for parameter, grad in pairs if grad is not None}
        self._request.graphed_update.run(self._launch, gradients, outcome.norm)
        self.used = outcome.gradients
        return replace(outcome, gradients=None)

    def without_effect(self) -> AbstractContextManager[None]:
        """Inside, a replay changes no weight."""
        graphed = self._request.graphed_update
        return nullcontext() if graphed is None else graphed.without_effect()

    def run_passes(self) -> Outcome:
        """Forward and backward; leaves no gradient in the parameters."""
        results: list[MicroBatchResult] = []
        for static, micro_batch in zip(self._inputs, self._request.update, strict=True):
            result = self._request.run_forward(micro_batch._replace(batch=static.batch))
            results.append(replace(result, loss=result.loss.detach()))
            fraction = self._get_fraction(len(results) - 1, result, results[0])
            scale_loss(result.loss, fraction, 1.0).backward()
        gradients = take_gradients(self._parameters)
        held = [gradient for gradient in gradients if gradient is not None]
        if not held:
            raise NotRepeatableError("a step has no gradients")
        if self._request.exchange is not None:
            return Outcome(results, gradients, None)
        divisor = self._get_factor(results)
        if isinstance(divisor, Tensor) or divisor != 1.0:
            multiply_all(held, divisor)
        return Outcome(results, gradients, get_norm(held))

    def _get_fraction(
        self, number: int, result: MicroBatchResult, first: MicroBatchResult
    ) -> float | Tensor:
        """As the clock computes it: in units of the first, if that is a number."""
        if result.is_weight_given != first.is_weight_given:
            raise NotRepeatableError("only some of its forward steps return a weight")
        if not result.is_weight_given:
            return 1.0 if self._is_whole else self._weights[number]
        if self._request.exchange is not None:
            return result.weight
        unit = 1.0 if isinstance(first.weight, Tensor) or first.weight <= 0 else first.weight
        return result.weight / unit

    def _get_factor(self, results: list[MicroBatchResult]) -> float | Tensor:
        if not results[0].is_weight_given:
            return 1.0 if self._is_whole else self._weights[-1]
        fractions = [self._get_fraction(n, result, results[0]) for n, result in enumerate(results)]
        return 1.0 / sum(fractions[1:], start=0.0 + fractions[0])

    def _leave(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        if self.gradients is None:
            return gradients
        pairs = list(zip(self.gradients, gradients, strict=True))
        moved = [(old, new) for old, new in pairs if old is not None and new is not None]
        copy_all([old for old, _ in moved], [new for _, new in moved])
        return [new if old is None or new is None else old for old, new in pairs]


def _copy_result(result: MicroBatchResult, counted: float) -> MicroBatchResult:
    weight = _copy(result.weight if result.is_weight_given else counted)
    parts: dict[str, Mean] = {}
    for name, (mean, part_weight) in result.parts.items():
        # Parts without a weight have that of the loss.
        is_counted = not isinstance(part_weight, Tensor) and part_weight == result.weight
        is_same = part_weight is result.weight or is_counted
        parts[name] = mean.clone(), weight if is_same else _copy(part_weight)
    return replace(result, loss=result.loss.clone(), weight=weight, parts=parts)


def _copy(weight: float | Tensor) -> float | Tensor:
    return weight.clone() if isinstance(weight, Tensor) else weight
