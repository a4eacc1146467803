"""``predict``: peak memory and work of the rank that needs the most, from what was measured once.

A step has a few moments at which a rank may need the most: when the loss is computed, in the
backward pass of a block while most activations are still there, at the end of the backward pass
when all gradients are. The largest one is the peak.
"""

from __future__ import annotations

from dataclasses import replace

from rapidformer.config import Settings
from rapidformer.planning.layout import LARGE, Layout, Stage, State, count_work
from rapidformer.planning.parts import Cost, Memory, Part, Prediction, Shape

_CONTEXT = 880 * 10**6
"""Of CUDA's context and loaded kernels, measured on an H200."""
_COMMUNICATOR = 2**29
_FRAGMENTS = {"everything": 0.03, "compiled": 0.045, "products": 0.06, "inputs": 0.06}
"""Of what is allocated: memory that the allocator holds in blocks that do not fit, by what a block
keeps. The allocations of GPT-2, BERT and Llama were replayed in a model of torch's allocator under
ever smaller limits: 0 to 3 %, BERT 6 %, with recompute 4 to 7 %."""
_LOST_LOGITS = 1 / 3
"""The same of logits that are held whole, of which there are three copies: an optimizer's state may
lie in the block of one. Qwen3 0.6B needed that on an H200."""
_CHUNK = 2**30
"""Of the fused loss: a chunk's logits in fp32."""
_WORKSPACE = 70 * 2**20
"""Of the libraries of matrix products."""


def predict(shape: Shape, settings: Settings, world_size: int) -> Prediction:
    """For the rank that needs the most; the settings are resolved, for this or other ranks."""
    args = settings.replace("rapidformer plan", world_size=world_size)
    layout = Layout(shape, args)
    ranks = [(_Rank(layout, stage), stage) for stage in layout.list_stages()]
    rank, stage = max(ranks, key=lambda each: each[0].memory.total)
    return Prediction(memory=rank.memory, work=count_work(layout, stage))


class _Rank:
    def __init__(self, layout: Layout, stage: Stage) -> None:
        self._layout, self._stage = layout, stage
        self._args, self._shape = layout.args, layout.shape
        self._kinds = stage.list_kinds(max(layout.args.recompute_interval, 1))
        self.memory = self._find_peak()

    # ---- sizes ----------------------------------------------------------------------------------

    def _divide_split(self, part: Part, cost: Cost) -> float:
        """A cost of activations; tensor parallelism splits the same share as of those saved."""
        value, tensor = self._layout.at(cost), self._layout.divide("layers")
        if tensor == 1:
            return value
        kept = self._layout.at(part.saved) - self._layout.at(part.casts)
        share = min(self._layout.at(part.saved_split) / kept, 1.0) if kept > 0 else 0.0
        stream = (1 - share) / self._layout.divide("stream")
        return value * (share / tensor + stream)

    def _measure_kept(self, part: Part) -> float:
        """What a block keeps for its backward pass, without copies of weights."""
        kept = self._layout.kept
        casts = self._layout.at(part.casts)
        if kept == "inputs":
            return self._divide_split(part, part.inputs)
        if kept == "products":
            return self._divide_split(part, part.saved_selective + part.inputs)
        if kept == "compiled":
            return self._divide_split(part, part.saved_compiled)
        return self._divide_split(part, part.saved) - casts

    def _sum_blocks(self) -> tuple[float, float]:
        """Activations of all blocks, and what the backward pass of one brings back at most."""
        kept, restored = 0.0, 0.0
        is_recomputed = self._layout.kept in ("inputs", "products")
        for part, count, chosen in self._kinds:
            everything = self._divide_split(part, part.saved) - self._layout.at(part.casts)
            own = self._measure_kept(part)
            if is_recomputed:
                kept += own * chosen + everything * (count - chosen)
                restored = max(restored, everything - own + self._layout.at(part.inputs))
            else:
                kept += own * count
        return kept, restored

    def _sum_casts(self) -> float:
        """Copies of weights in 16 bits that live as long as the forward pass, at least."""
        if self._layout.kept == "compiled":
            return 0.0
        scale = 1 / self._layout.divide("layers")
        return scale * sum(
            count * self._layout.at(part.casts)
            for part, count, _ in self._kinds
            if self._layout.kept == "everything" or part.weights.trained > part.weights.frozen
        )

    # ---- moments --------------------------------------------------------------------------------

    def _find_peak(self) -> Memory:
        layout, stage, shape = self._layout, self._stage, self._shape
        state = layout.count_state(stage)
        activations, restored = self._sum_blocks()
        casts, host = self._sum_casts(), 0.0
        is_graphed = layout.has("CUDA graph")
        if is_graphed and shape.filled < 1:
            # Before batches get other widths, their passes are compared, uncompiled and padded.
            activations = sum(
                count * self._layout.at(part.saved, is_padded=True)
                for part, count, _ in self._kinds
            )
            casts = 0.0
        if layout.is_on_host("activations") and stage.blocks:
            largest = 2 * max(self._measure_kept(part) for part, *_ in self._kinds)
            host += max(activations - largest, 0.0) * stage.in_flight
            activations = min(activations, largest)
        first = self._layout.at(shape.rest.saved) if stage.is_first else 0.0
        kept = (activations + casts * (layout.kept == "everything")) * stage.in_flight + first
        brief = casts * (layout.kept != "everything")
        loss, head = self._measure_loss()
        ends = self._get_gradients(state)
        backward = max(
            (self._divide_split(part, part.backward_peak) for part, *_ in self._kinds), default=0.0
        )
        held, at_end, gathers = self._count_copies(state)
        last = self._layout.at(shape.rest.backward_peak) if stage.is_first else 0.0
        moments = [
            # when the loss is computed
            {"activations": kept + brief, "loss": loss, "gradients": held},
            # in the backward pass of the last block
            {"activations": kept + restored, "buffers": backward, "gradients": max(held, head)},
            # at the end of the backward pass, and in the update
            {"activations": first, "buffers": last + at_end, "gradients": ends},
        ]  # fmt: skip
        worst = max(moments, key=lambda moment: sum(moment.values()))
        return self._build(state, worst, gathers, host)

    def _get_gradients(self, state: State) -> float:
        if self._layout.is_on_host("gradients"):
            return 0.0
        is_sharded = self._layout.is_sharded("optimizer")  # from stage 1 on, after the last one
        return float(state.gradients if is_sharded else state.trained)

    def _count_copies(self, state: State) -> tuple[float, float, float]:
        """Gradients held during the forward pass, copies at the end, and gathered weights."""
        layout, args = self._layout, self._args
        block = max((layout.add_up(part.weights).whole for part, *_ in self._kinds), default=0)
        rest = layout.add_up(self._stage.rest).whole
        held, at_end, gathers = 0.0, 0.0, 0.0
        if (args.gradient_accumulation_steps or 1) > 1:
            is_whole = layout.is_sharded("optimizer") and not layout.is_sharded("gradients")
            held = float(state.trained if is_whole else self._get_gradients(state))
        for row in layout.rows.values():
            if row.effect.copies_gradients == "always":
                held = max(held, float(state.trained))
            elif row.effect.copies_gradients == "at the end":
                at_end += state.trained
        if layout.shards > 1 or layout.is_on_host("weights"):
            # A block that is gathered exists twice for a moment, while the one before computes; its
            # gradients once more, as they are sent.
            few = rest + 3 * block + 2 * block * bool(state.trained)
            gathers = few if layout.is_sharded("weights") else state.whole + 2 * block
        return held, at_end, gathers

    def _measure_loss(self) -> tuple[float, float]:
        """The most that the loss needs, and the gradient of the head that is left of it."""
        shape, layout = self._shape, self._layout
        if not self._stage.is_last:
            return 0.0, 0.0
        tensor = layout.divide("layers")
        tokens = self._layout.at(Cost(per_token=1.0)) * shape.trained_tokens
        is_short = self._args.fused_loss == "auto" and 2 * tokens < shape.hidden_size
        if not layout.has_fused_loss or is_short:
            scale = 1 / tensor if shape.vocabulary >= LARGE else 1.0
            after = self._layout.at(shape.loss.saved) + self._layout.at(shape.loss.backward_peak)
            return scale * max(self._layout.at(shape.loss.forward_peak), after), 0.0
        is_trained = any(p.is_trained and "after" in p.places for p in self._stage.rest.parameters)
        width = 4 if shape.precision == "fp32" else 2
        words = shape.vocabulary / tensor
        rows = max(int(_CHUNK / (4 * words)), 128)
        rows = min(1 << (rows.bit_length() - 1), 1 << int(max(tokens - 1, 0)).bit_length())
        chunks = 2 if tokens > rows else 1  # the next one is computed before the last one is freed
        head = 4 * shape.head / tensor * is_trained
        # Hidden states and their gradients, and those of the norm before the head, in fp32.
        hidden = tokens * shape.hidden_size * (2 * width + 2 * 4)
        table = width * shape.head / tensor * (width < 4)
        return hidden + head + chunks * rows * words * width + table, head

    def _build(self, state: State, moment: dict[str, float], gathers: float, host: float) -> Memory:
        layout, args = self._layout, self._args
        parts = {
            name: (0 if layout.is_on_host(name) else getattr(state, name))
            for name in ("weights", "optimizer")
        }
        for name in ("weights", "gradients", "optimizer"):
            host += getattr(state, name) * layout.is_on_host(name)
        if layout.has("merged linear layers") and layout.has("CUDA graph"):
            gathers += state.whole / 2
        moment = {"buffers": 0.0, "loss": 0.0, **moment}
        moment["buffers"] += _WORKSPACE + sum(row.effect.takes for row in layout.rows.values())
        parts["weights"] += self._shape.reference_bytes
        memory = Memory(
            **{name: int(value) for name, value in parts.items()},
            **{name: int(value) for name, value in moment.items()},
            gathers=int(gathers), host=int(host),
        )  # fmt: skip
        axes = [args.data_parallel_size, args.tensor_model_parallel_size]
        axes += [args.pipeline_model_parallel_size, args.context_parallel_size]
        groups = sum(size > 1 for size in axes)
        fragments = _FRAGMENTS[layout.kept] * memory.allocated
        if not layout.has_fused_loss:
            fragments += _LOST_LOGITS * memory.loss
        return replace(memory, overhead=_CONTEXT + groups * _COMMUNICATOR, fragments=int(fragments))
