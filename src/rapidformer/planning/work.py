"""What a rank computes, moves and sends in a step, from what was measured once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rapidformer.planning.layout import Layout, Stage, State
from rapidformer.planning.parts import Collective, Cost, Load, Part, Work

_COSTS = ("matrix_flops", "attention_flops", "moved")

_FUSED_LOSS = 6
"""Bytes that a fused loss reads and writes for each logit beside its products."""
_REPEATED = 0.6
"""The forward pass's part of a block's operations, by the time that the host takes for them."""


def count_work(layout: Layout, stage: Stage) -> Work:
    """The work of one rank of the pipeline."""
    args, shape = layout.args, layout.shape
    rows, length = shape.count_rows(args.micro_batch_size), float(shape.length)
    filled = shape.filled if layout.has("dynamic shape") else 1.0
    tensor, context = layout.divide("layers"), args.context_parallel_size

    def at(cost: Cost) -> float:
        varying = cost.at(rows * filled, length) - cost.constant
        return (cost.constant + varying / context) / tensor

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
        tokens=shape.count_rows(args.global_batch_size) * length * shape.filled,
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
            ranks=layout.replicas, per="update", is_hidden=True,
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
