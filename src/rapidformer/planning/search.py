"""The layouts that fit, ranked by predicted time, and answers to what people ask. Without torch.

A layout changes where the work is done, never its result: the global batch stays as it is.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any

from rapidformer.config import Settings
from rapidformer.config.layout_rules import AXES_OF_A_SAMPLE, find_layout_problems
from rapidformer.config.switches import to_flag
from rapidformer.errors import RapidformerError
from rapidformer.planning.devices import GIB, Cluster
from rapidformer.planning.parts import Prediction, Shape, Verdict, Work
from rapidformer.planning.predict import predict
from rapidformer.planning.timing import Timing, compare_blocks, estimate

SOURCE = "rapidformer plan"
MOST_ROWS = 4096
_LONGEST = 2**22
_ZERO = tuple(f"zero_{stage}_memory_optimization" for stage in (1, 2, 3))
_OFF: dict[str, Any] = dict.fromkeys((*_ZERO, "fsdp_memory_optimization"), False)
_RECOMPUTE: tuple[dict[str, Any], ...] = (
    {"checkpoint_activations": False, "recompute_granularity": None},
    {"checkpoint_activations": True, "recompute_granularity": "selective"},
    {"checkpoint_activations": True, "recompute_granularity": "full"},
)
_BATCH = frozenset({"micro_batch_size", *AXES_OF_A_SAMPLE})
_FOLLOWS = frozenset({"gradient_accumulation_steps", "checkpoint_activations"})
"""Settings that follow from others among the changes."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run the same training."""

    settings: Settings
    changes: dict[str, Any] = field(default_factory=dict)
    """What differs from the settings that were asked about."""
    prediction: Prediction
    timing: Timing

    @property
    def gib(self) -> float:
        """The peak of the rank that needs the most."""
        return self.prediction.memory.total / GIB

    def judge(self, cluster: Cluster) -> Verdict:
        """Whether it fits these devices."""
        return self.prediction.memory.judge(cluster.device.memory * GIB)

    def list_flags(self) -> str:
        """The flags to copy; empty for the settings as they are."""
        return render_flags(self.changes)


def render_flags(changes: dict[str, Any]) -> str:
    """Settings as they are written on the command line, then what is to be taken off it."""
    words, dropped = [], []
    for name, value in changes.items():
        if value is None or value is False:
            dropped.append(to_flag(name))
        else:
            words += [to_flag(name)] if value is True else [to_flag(name), shlex.quote(str(value))]
    return " ".join([*words, *(["without", *dropped] if dropped else [])])


class Planner:
    """Predictions of one training on one cluster."""

    def __init__(self, shape: Shape, settings: Settings, cluster: Cluster) -> None:
        """``settings`` are resolved for the ranks of the cluster."""
        self.shape, self.settings, self.cluster = shape, settings, cluster
        self._typical = shape
        if shape.filled < 1 and shape.lengths:
            filled = sum(shape.lengths) / len(shape.lengths) / max(shape.lengths)
            self._typical = replace(shape, filled=filled)
        self.slowness = compare_blocks(shape, cluster.device)
        """Measured time of the blocks over the predicted one; None if they were not timed."""

    def plan(self, **changes: Any) -> Layout:
        """The training with other settings; raises if its blocks cannot be divided like that."""
        settings = self.settings.replace(SOURCE, **changes)
        prediction = self._predict(self.shape, settings)
        timing = estimate(
            self._count_work(settings, prediction), settings, self.cluster, self.shape.precision,
            factor=1.0 if self.slowness is None else self.slowness,
        )  # fmt: skip
        changed = {
            name: value
            for name, value in changes.items()
            if value != getattr(self.settings, name) and name not in _FOLLOWS
        }
        if _BATCH & changed.keys() and not self.settings.is_given("global_batch_size"):
            changed["global_batch_size"] = settings.global_batch_size  # or it would follow
        return Layout(settings=settings, changes=changed, prediction=prediction, timing=timing)

    def _count_work(self, settings: Settings, prediction: Prediction) -> Work:
        """Of an average micro-batch: memory is decided by the fullest one."""
        if self._typical is self.shape:
            return prediction.work
        return self._predict(self._typical, settings).work

    def _predict(self, shape: Shape, settings: Settings) -> Prediction:
        found = predict(shape, settings, self.cluster.count)
        memory = found.memory
        # Passes are recorded beside those that they are compared with, or else not at all.
        twice = 2 * memory.allocated - memory.weights - memory.optimizer
        is_recorded = found.work.is_captured and settings.cuda_graph != "on"
        if is_recorded and twice > self.cluster.device.memory * GIB:
            return predict(shape, settings.replace(SOURCE, cuda_graph="off"), self.cluster.count)
        return found

    # ---- layouts ---------------------------------------------------------------------------------

    def list_layouts(self, most: int) -> list[Layout]:
        """The fastest ones that fit."""
        return self._choose(self._list_candidates(), most)

    def _choose(self, candidates: Iterable[dict[str, Any]], most: int) -> list[Layout]:
        """Those that fit and may be combined, the fastest first."""
        planned = []
        for changes in candidates:
            with suppress(RapidformerError):
                planned.append(self.plan(**changes))
        fitting = [each for each in planned if each.judge(self.cluster) == "fits"]
        fitting.sort(key=lambda layout: (layout.timing.step, len(layout.changes)))
        # Last, because it takes longer than a prediction.
        allowed = (each for each in fitting if not any(find_layout_problems(each.settings)))
        return list(islice(allowed, most))

    def _list_candidates(self) -> Iterator[dict[str, Any]]:
        ranks, total = self.cluster.count, self.settings.global_batch_size or 1
        length, compiled = self.shape.length, {self.settings.compile, True}
        # Long rows alone are worth splitting.
        splits = [n for n in (1, 2, 4, 8) if n == 1 or (length // n >= 2048 and length % n == 0)]
        for tensor, stages, context in product(
            self._list_tensor_sizes(), self._list_stages(), splits
        ):
            replicas, rest = divmod(ranks, tensor * stages * context)
            if rest or not replicas or total % replicas or (stages > 1 and context > 1):
                continue
            axes = {
                "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": stages,
                "context_parallel_size": context,
            }  # fmt: skip
            for choice in product(
                self._list_batches(total // replicas), self._list_zero(replicas, stages),
                _RECOMPUTE, [{"compile": value} for value in compiled],
            ):  # fmt: skip
                changes = dict(axes)
                for more in choice:
                    changes |= more
                yield changes

    def _list_tensor_sizes(self) -> list[int]:
        """Within a node, and dividing every weight that is split."""
        most = min(self.cluster.device.per_node, self.cluster.count)
        lengths = {
            each.length
            for group in self.shape.blocks
            for each in group.part.weights.parameters
            if each.split_dim == 0
        }
        sizes = [size for size in (2, 4, 8) if size <= most and lengths]
        return [1, *(size for size in sizes if all(length % size == 0 for length in lengths))]

    def _list_stages(self) -> list[int]:
        """Whole blocks on each stage."""
        stacks = {group.stack for group in self.shape.blocks}
        blocks = sum(group.count for group in self.shape.blocks)
        if len(stacks) != 1:
            return [1]
        most = min(blocks, self.cluster.count)
        return [n for n in (1, 2, 4, 8, 16, 32) if n <= most and blocks % n == 0]

    def _list_batches(self, rows: int) -> list[dict[str, int]]:
        """Micro-batches that make up a rank's rows of an update."""
        given = self.settings.micro_batch_size or 1
        sizes = [n for n in (1, 2, 4, 8, given) if rows % n == 0]
        return [
            {"micro_batch_size": n, "gradient_accumulation_steps": rows // n}
            for n in sorted(set(sizes))
        ]

    def _list_zero(self, replicas: int, stages: int) -> list[dict[str, Any]]:
        if replicas == 1:
            return [_OFF]
        stages_of_zero = _ZERO[:1] if stages > 1 else _ZERO
        return [_OFF, *({**_OFF, name: True} for name in stages_of_zero)]

    # ---- questions -------------------------------------------------------------------------------

    def find_largest_batch(self) -> int:
        """Rows of the largest micro-batch that fits; 0 if not even one row does."""

        steps = self.settings.gradient_accumulation_steps or 1
        unit = self.settings.data_parallel_size * steps
        return _find_most(
            lambda rows: self._fits(micro_batch_size=rows, global_batch_size=unit * rows), MOST_ROWS
        )

    def find_longest(self) -> int:
        """Tokens of the longest rows that fit and have positions, with the micro-batch as it is."""
        shape = self.shape
        most = max(shape.positions or _LONGEST, shape.length)  # a run may go beyond rotary ones
        return _find_most(lambda length: self._fits(replace(shape, length=length)), most)

    def _fits(self, shape: Shape | None = None, **changes: Any) -> bool:
        settings = self.settings.replace(SOURCE, **changes)
        memory = self._predict(shape or self.shape, settings).memory
        return memory.judge(self.cluster.device.memory * GIB) == "fits"

    def list_switches(self, most: int) -> list[Layout]:
        """Single switches that make it fit, the cheapest in time first."""
        return self._choose(self._list_single_changes(), most)

    def _list_single_changes(self) -> Iterator[dict[str, Any]]:
        settings, replicas = self.settings, self.settings.data_parallel_size
        rows = (settings.global_batch_size or 1) // max(replicas, 1)
        micro = settings.micro_batch_size or 1
        for size in (n for n in range(micro - 1, 0, -1) if rows % n == 0):
            yield {"micro_batch_size": size, "gradient_accumulation_steps": rows // size}
        if settings.recompute_granularity != "full":
            yield from (changes for changes in _RECOMPUTE[1:])
        if not settings.compile:
            yield {"compile": True}
        if not settings.activation_offload:
            yield {"activation_offload": True}
        for stage, name in enumerate(_ZERO, 1):
            if replicas > 1 and stage > settings.zero_stage:
                yield {**_OFF, name: True}
        if not settings.cpu_offload:
            yield {**_OFF, "cpu_offload": True, "zero_3_memory_optimization": True}


def _find_most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to the limit for which it holds; it holds for all smaller ones."""
    if not fits(1):
        return 0
    low = 1
    while low < limit and fits(min(2 * low, limit)):
        low = min(2 * low, limit)
    high = min(2 * low, limit)
    # To three figures: more than the prediction is worth.
    while high - low > max(low // 1000, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
