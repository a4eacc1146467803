"""How a run's settings divide its model and its work: what each switch's row says of one run."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from rapidformer.accel.pipeline.layout import build_layout
from rapidformer.config import Settings
from rapidformer.config.effect import MOST_COPIED, Effect, Kept
from rapidformer.config.row import Situation, Switch
from rapidformer.config.switches import SWITCHES
from rapidformer.planning.parts import (
    Collective,
    Cost,
    Load,
    Parameter,
    Part,
    Shape,
    Weights,
    Work,
)

_SIZES = {
    "layers": "tensor_model_parallel_size", "tokens": "context_parallel_size",
    "blocks": "pipeline_model_parallel_size", "experts": "expert_model_parallel_size",
    "stream": "tensor_model_parallel_size",
}  # fmt: skip
LARGE = 4096
"""Smallest vocabulary of a fused loss."""
_ADAM, _MOMENTUM = 8.0, 4.0
"""Bytes of state for each trained weight."""
_SMALL = 4096
"""Moments of fewer weights are not quantized."""
_LOOKUP_COST = 0.05
"""Of an embedding table's weight, relative to one that is multiplied."""
_COSTS = ("matrix_flops", "attention_flops", "moved")
_FUSED_LOSS = 6
"""Bytes that a fused loss reads and writes for each logit beside its products."""
_REPEATED = 0.6
"""The forward pass's part of a block's operations, by the time that the host takes for them."""


class Layout:
    """The effects of the rows that are on."""

    def __init__(self, shape: Shape, args: Settings) -> None:
        self.shape, self.args = shape, args
        self._states: dict[int, State] = {}
        situation = Situation(device="cuda", precision=shape.precision)
        self.rows = {row.name: row for row in SWITCHES if _is_on(row, args, situation)}
        graph = self.rows.get("CUDA graph")
        if graph and (self._is_busy(graph.effect) or self._is_too_large_to_be_whole()):
            del self.rows["CUDA graph"]

    def has(self, name: str) -> bool:
        """Whether a row is on."""
        return name in self.rows

    @cached_property
    def has_fused_loss(self) -> bool:
        """Whether logits are computed a chunk at a time."""
        return self.has("fused loss") and self.shape.vocabulary >= LARGE

    def _is_busy(self, effect: Effect) -> bool:
        """Whether a micro-batch is too much work for a switch that saves launches."""
        if self.args.cuda_graph == "on" or effect.most_work is None:
            return False
        rows, length = self.shape.count_rows(self.args.micro_batch_size), self.shape.length
        parts = [(group.count, group.part) for group in self.shape.blocks]
        parts += [(1, self.shape.rest), (1, self.shape.loss)]
        work = sum(
            n * (part.matrix_flops.at(rows, length) + part.attention_flops.at(rows, length))
            for n, part in parts
        )
        return work > effect.most_work

    def at(self, cost: Cost, *, is_padded: bool = False) -> float:
        """A cost of one micro-batch on a rank."""
        shape, args = self.shape, self.args
        rows = shape.count_rows(args.micro_batch_size)
        if not is_padded and self.has("dynamic shape"):
            rows *= shape.filled
        varying = cost.at(rows, shape.length) - cost.constant
        return cost.constant + varying / args.context_parallel_size

    def _is_too_large_to_be_whole(self) -> bool:
        """Whether ZeRO-2 or -3 shards more weights than may stay gathered for replayed steps."""
        if self.shards == 1 or self.args.zero_stage == 1:
            return False
        return sum(self.count_state(stage).whole for stage in self.list_stages()) > MOST_COPIED

    @cached_property
    def shards(self) -> int:
        """Ranks that the training state is sharded over."""
        if "ZeRO" not in self.rows:
            return 1
        return self.args.hybrid_sharding_size or self.args.num_replicas

    def divide(self, what: str) -> int:
        """By how much the rows divide something."""
        return self._sizes.get(what, 1)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        divided = [row.effect.divides for row in self.rows.values() if row.effect.divides]
        return {what: int(getattr(self.args, _SIZES[what])) for what in divided}

    @cached_property
    def kept(self) -> Kept:
        """What a block keeps; the innermost of recompute and compilation decides."""
        for row in self.rows.values():
            for name in row.turned_on_by:
                kept = row.effect.keeps.get(getattr(self.args, name))
                if kept is not None:
                    return kept
        return "everything"

    def is_on_host(self, part: str) -> bool:
        """Whether a part of the memory is on the host."""
        return any(part in row.effect.on_host for row in self.rows.values())

    def is_sharded(self, part: str) -> bool:
        """Whether a part of the state is sharded at this ZeRO stage, also during an update."""
        # Replayed steps have whole what it would be in ZeRO-1.
        stage = 1 if self.has("CUDA graph") else self.args.zero_stage
        zero = self.rows.get("ZeRO")
        return zero is not None and stage >= zero.effect.shards_from.get(part, stage + 1)

    @property
    def moments(self) -> float:
        """Bytes of optimizer state for each trained weight."""
        for row in self.rows.values():
            if row.effect.moments is not None:
                return row.effect.moments
        own, args = self.shape.optimizer, self.args
        if own in ("SGD", "RMSprop", "Adagrad") or (not own and args.optimizer == "sgd"):
            return _MOMENTUM if own or args.sgd_momentum else 0.0
        return _ADAM

    def count(self, parameter: Parameter, *, shards: int = 1) -> int:
        """Elements of a parameter on one rank; the first rank has the most."""
        length, width = parameter.length, parameter.size // max(parameter.length, 1)
        tensor, experts = self.divide("layers"), self.divide("experts")
        if parameter.heads % tensor:
            tensor = 1  # fewer heads than ranks: each has them all
        if parameter.split_dim == 0:
            length = -(-length // tensor)
        elif parameter.split_dim == 1:
            width = -(-width // tensor)
        if parameter.is_expert:
            length = -(-length // experts)
            shards = max(shards // experts, 1)
        return -(-length // shards) * width

    def count_state(self, stage: Stage) -> State:
        """The training state of one rank of the pipeline."""
        total = self.add_up(stage.rest)
        for part, count, _ in stage.list_kinds():
            total += self.add_up(part.weights) * count
        return total

    def add_up(self, weights: Weights) -> State:
        """The state of a part of the model on one rank."""
        if id(weights) not in self._states:  # equal blocks have the same weights
            self._states[id(weights)] = self._add_up(weights)
        return self._states[id(weights)]

    def _add_up(self, weights: Weights) -> State:
        total = State()
        for each in weights.parameters:
            own, mine = self.count(each), self.count(each, shards=self.shards)
            moments = self._count_moments(mine, is_matrix=each.is_matrix)
            total += State(
                weights=mine * each.width, whole=own * each.width,
                gradients=mine * each.width * each.is_trained,
                trained=own * each.width * each.is_trained,
                optimizer=int(moments * each.is_trained),
                elements=mine * each.is_trained,
            )  # fmt: skip
        return total

    def _count_moments(self, elements: int, *, is_matrix: bool) -> float:
        is_plain = self.has("Muon") and not is_matrix
        is_plain = is_plain or (self.has("int8 moments") and elements < _SMALL)
        return elements * (_ADAM if is_plain else self.moments)

    def list_stages(self) -> Iterator[Stage]:
        """What each rank of the pipeline has, the ends first; one rank without a pipeline."""
        placed = {place: group.part for group in self.shape.blocks for place in group.places}
        parts = [placed[place] for place in sorted(placed)]
        ranks = self.divide("blocks")
        before = [p for p in self.shape.rest.weights.parameters if "before" in p.places]
        after = [p for p in self.shape.rest.weights.parameters if "after" in p.places]
        if ranks == 1:
            yield Stage(parts, True, True, self.shape.rest.weights, 1.0)
            return
        cut = _cut(
            tuple(part.weights.trained + part.weights.frozen for part in parts),
            _LOOKUP_COST * sum(p.size for p in before), sum(p.size for p in after), ranks,
            self.args.pipeline_schedule, self.args.num_layers_per_virtual_pipeline_stage,
            self.shape.model,
        )  # fmt: skip
        count = self.args.gradient_accumulation_steps or 1
        for rank in range(ranks):
            own = cut.get_own(rank)
            is_first, is_last = any(s.is_first for s in own), any(s.is_last for s in own)
            weights = (before if is_first else []) + (after if is_last else [])
            distinct = {id(each): each for each in weights}
            yield Stage(
                [part for stage in own for part in parts[stage.start : stage.end]],
                is_first, is_last, Weights(parameters=tuple(distinct.values())),
                _count_in_flight(cut.schedule, rank, ranks, len(own), count),
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class State:
    """Bytes of the training state on one rank."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    whole: int = 0
    """Weights without sharding."""
    trained: int = 0
    """Gradients without sharding."""
    elements: int = 0
    """Trained elements, sharded."""

    def __add__(self, other: State) -> State:
        return State(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in _FIELDS})

    def __mul__(self, count: int) -> State:
        return State(**{f.name: getattr(self, f.name) * count for f in _FIELDS})


_FIELDS = fields(State)


@dataclass(frozen=True)
class Stage:
    """What one rank of the pipeline has."""

    blocks: list[Part]
    is_first: bool
    is_last: bool
    rest: Weights
    in_flight: float
    """Micro-batches whose activations are held at once."""

    def list_kinds(self, interval: int = 1) -> list[tuple[Part, int, int]]:
        """Each kind of block, how many there are, and how many of them every n-th block is."""
        found: dict[int, tuple[Part, int, int]] = {}
        for number, part in enumerate(self.blocks):
            _, count, chosen = found.get(id(part), (part, 0, 0))
            found[id(part)] = (part, count + 1, chosen + (number % interval == 0))
        return list(found.values())


@functools.cache
def _cut(
    costs: tuple[int, ...], before: float, after: float, ranks: int, schedule: str | None,
    layers: int | None, model: str,
) -> Any:  # fmt: skip
    """The stages of a pipeline; a search asks for the same ones again and again."""
    return build_layout(
        costs, before=before, after=after, num_processes=ranks, schedule=schedule,
        layers_per_stage=layers, model=model,
    )  # fmt: skip


def _is_on(row: Switch, args: Settings, situation: Situation) -> bool:
    if args.deepspeed and row.under_deepspeed == "done by DeepSpeed":  # at the same cost
        args = args.replace("rapidformer plan", deepspeed=None)
    return row.applies(args, situation)


def _count_in_flight(schedule: str, rank: int, ranks: int, own: int, count: int) -> float:
    if schedule == "gpipe":
        return count
    if schedule == "1f1b":
        return min(ranks - rank, count)
    if schedule == "zero-bubble":
        return min(ranks, count)
    waiting = 2 * (ranks - rank - 1) + (own - 1) * ranks + 1
    return min(waiting / own, count)


# ---- the work of a step --------------------------------------------------------------------------


def count_work(layout: Layout, stage: Stage) -> Work:
    """The work of one rank of the pipeline."""
    args, shape = layout.args, layout.shape

    def at(cost: Cost) -> float:
        return layout.at(cost) / layout.divide("layers")

    def count(parts: list[Part]) -> Load:
        return Load(
            **{name: sum(at(getattr(part, name)) for part in parts) for name in _COSTS},
            operations=sum(part.operations for part in parts),
        )

    blocks, rest = stage.blocks, [shape.rest] * stage.is_first
    ends = count([*rest, *[shape.loss] * stage.is_last])
    if layout.has_fused_loss:
        logits = Cost(per_token=shape.vocabulary * shape.trained_tokens * _FUSED_LOSS)
        ends = replace(ends, moved=count(rest).moved + at(logits))
    load = count(blocks)
    if any(row.effect.in_8_bits for row in layout.rows.values()):
        load = replace(load, low_flops=load.matrix_flops)
    if layout.kept in ("inputs", "products"):
        repeated = blocks[:: max(args.recompute_interval, 1)]
        again = _COSTS if layout.kept == "inputs" else ("moved",)
        more = {
            name: sum(at(getattr(part, name)) * part.forward_share for part in repeated)
            for name in again
        }
        load = replace(
            load, **{name: getattr(load, name) + value for name, value in more.items()},
            operations=load.operations + round(_REPEATED * sum(p.operations for p in repeated)),
        )  # fmt: skip
    state = layout.count_state(stage)
    # Weights and moments are read and written, gradients read twice.
    update = state.elements * (2 * 4 + 2 * 4) + 2 * state.optimizer
    is_on_host = layout.is_on_host("optimizer")
    kept = sum(at(part.saved) for part in blocks)
    return Work(
        blocks=load,
        rest=ends,
        update_bytes=0.0 if is_on_host else update,
        host_bytes=2 * kept * layout.is_on_host("activations")
        + 3 * state.whole * layout.is_on_host("weights"),
        host_update_bytes=update if is_on_host else 0.0,
        collectives=tuple(_list_collectives(layout, stage, state)),
        micro_batches=args.gradient_accumulation_steps or 1,
        stages=args.pipeline_model_parallel_size,
        tokens=shape.count_rows(args.global_batch_size) * shape.length * shape.filled,
        samples=args.global_batch_size or 1,
        is_captured=layout.has("CUDA graph"),
    )


def _list_collectives(layout: Layout, stage: Stage, state: State) -> Iterator[Collective]:
    args, shape = layout.args, layout.shape
    width = 4 if shape.precision == "fp32" else 2
    tokens = shape.count_rows(args.micro_batch_size) * shape.length / args.context_parallel_size
    hidden = tokens * shape.hidden_size * width
    count = len(stage.blocks)
    trained, weights = state.trained, state.whole
    if layout.has("data parallelism"):
        yield Collective(
            axis="data", kind="all_reduce", size=trained, calls=-(-trained // (25 * 2**20)),
            ranks=args.num_replicas, per="update", is_hidden=True,
        )  # fmt: skip
    if layout.shards > 1:
        is_each = layout.is_sharded("weights")
        yield Collective(
            axis="data", kind="all_gather", size=weights * (2 if is_each else 1),
            calls=count * (2 if is_each else 1) + 1, ranks=layout.shards,
            per="micro_batch" if is_each else "update", is_hidden=True,
        )  # fmt: skip
        yield Collective(
            axis="data", kind="reduce_scatter", size=trained, calls=count + 1,
            ranks=layout.shards, is_hidden=True,
            per="micro_batch" if layout.is_sharded("gradients") else "update",
        )  # fmt: skip
    tensor = layout.divide("layers")
    if tensor > 1:
        # Two in the forward pass of a block and two in its backward pass.
        yield Collective(
            axis="tensor", kind="all_reduce", size=4 * hidden * count, calls=4 * count,
            ranks=tensor,
        )  # fmt: skip
    if args.context_parallel_size > 1:
        # Queries, keys, values and results, there and back.
        yield Collective(
            axis="context", kind="all_to_all", size=8 * hidden * count, calls=8 * count,
            ranks=args.context_parallel_size,
        )  # fmt: skip
    if args.pipeline_model_parallel_size > 1:
        yield Collective(
            axis="pipeline", kind="send", size=2 * hidden, calls=2, ranks=2, is_hidden=True
        )  # fmt: skip
    if args.expert_model_parallel_size > 1:
        yield Collective(
            axis="expert", kind="all_to_all", size=4 * hidden * count, calls=4 * count,
            ranks=args.expert_model_parallel_size,
        )  # fmt: skip
