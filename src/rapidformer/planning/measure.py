"""``measure``: the passes of a run's own model, followed once without values.

Each kind of block is followed once, at three sizes of a micro-batch, which give what is constant,
what grows with the tokens and what with their pairs. The rest of the blocks are like these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.fused_loss.fused_loss import find_head
from rapidformer.accel.grouped_experts import apply_grouped_experts
from rapidformer.accel.lean_adapters import drop_casts, find_frozen_weights
from rapidformer.compat.torch_dispatch import tree_map_only
from rapidformer.config import Settings
from rapidformer.config.sections import AccelerationArguments
from rapidformer.errors import RapidformerError
from rapidformer.models.adapters import find_adapter
from rapidformer.models.configuration import get_position_limit, get_size
from rapidformer.models.deferred import clear_parameters
from rapidformer.models.plan import ModelPlan, find_plan
from rapidformer.models.recording import list_tensors
from rapidformer.planning.at_hand import BlockTimer
from rapidformer.planning.capture import Captured, capture
from rapidformer.planning.compiled import measure_kept
from rapidformer.planning.parts import Blocks, Cost, Load, Part, Shape, Timed
from rapidformer.planning.tracing import GpuTypes, Segment, Tracing
from rapidformer.planning.weights import SplitRules, count_weights

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


def measure(
    settings: Settings, train: Callable[[], None], timer: BlockTimer | None = None
) -> Shape:
    """Follow the run that ``train`` starts; ``settings`` are those of the run, resolved.

    With a ``timer``, a block of each kind also runs on the device at hand.
    """

    def follow(run: Captured) -> Shape:
        return _Measurement(run, get_precision(settings), settings).finish(timer)

    return capture(settings, train, follow)


def get_precision(settings: AccelerationArguments) -> str:
    """What a run on a GPU computes in."""
    asked = settings.mixed_precision
    return "fp32" if asked is None else "bf16" if asked == "auto" else asked


@dataclass
class _Kind:
    """Equal blocks of one stack, and the one that is followed."""

    stack: str
    names: list[str]

    @property
    def chosen(self) -> str:
        return self.names[-1]


class _Measurement:
    def __init__(self, run: Captured, precision: str, settings: Settings) -> None:
        self._run, self._settings = run, settings
        self._precision, self._dtype = precision, DTYPES[precision]
        self._model = run.model.train()
        clear_parameters(self._model)
        self._round_frozen()
        # transformers' own loop over experts looks at values.
        apply_grouped_experts(self._model, torch.device("cpu"))
        self._plan = find_plan(self._model)
        self._rules = SplitRules(self._model, self._plan)
        self._kinds = _list_kinds(self._model, self._plan)
        self._batch = _without_padding(run.batch)
        self._rows, self._length = _find_sizes(self._batch)
        self._calls: dict[str, tuple[Any, Any]] = {}
        self._used_after: set[int] = set()
        """Parameters of the modules that are called after the last block."""

    def finish(self, timer: BlockTimer | None) -> Shape:
        """All figures."""
        of_kinds = [
            count_weights(self._model.get_submodule(kind.chosen), self._rules, kind.chosen)
            for kind in self._kinds
        ]
        head = find_head(self._model)
        config: Any = getattr(self._model, "config", None)
        # What its table of positions holds; of rotary ones, what the model was made for.
        limit = config and (
            get_position_limit(config) or get_size(config, "max_position_embeddings")
        )
        hidden = getattr(config, "hidden_size", None) or getattr(config, "d_model", 0) or 0
        self._cut()
        points = self._list_points()
        traces = [self._trace(rows, length) for rows, length in points]
        fit = _Fit(points, traces)
        stacks = sorted({kind.stack for kind in self._kinds})
        rest = count_weights(
            self._model, self._rules, without=stacks, used_after=frozenset(self._used_after)
        )
        compiled = [
            measure_kept(
                self._modules[kind.chosen], self._calls.get(kind.chosen), self._dtype,
                rows=self._rows, length=self._length,
            )
            for kind in self._kinds
        ]  # fmt: skip
        blocks = tuple(
            Blocks(
                stack=kind.stack, places=tuple(map(self._plan.blocks.index, kind.names)),
                part=fit.build(kind.chosen, weights=weights, saved_compiled=kept),
                timed=None if timer is None else self._time(kind, traces[0], timer),
            )
            for kind, weights, kept in zip(self._kinds, of_kinds, compiled, strict=True)
        )  # fmt: skip
        spread = self._run.lengths
        longest = self._settings.seq_length if self._settings.packing else None
        return Shape(
            model=type(self._model).__name__, rows=self._rows,
            micro_batch_size=self._run.micro_batch_size, length=longest or self._length,
            filled=_guess_filled(spread, self._rows) if longest is None else 1.0,
            precision=self._precision, hidden_size=hidden,
            trained_tokens=_count_labelled(self._batch),
            vocabulary=0 if head is None else head.out_features,
            head=0 if head is None else head.weight.numel(),
            blocks=blocks, rest=fit.build("before", weights=rest), loss=fit.build("after"),
            positions=limit if isinstance(limit, int) and limit > 0 else None,
            reference_bytes=self._run.beside, lengths=tuple(spread), samples=self._run.samples,
            optimizer=self._run.optimizer,
        )  # fmt: skip

    def _round_frozen(self) -> None:
        """What the rows of mixed precision do to weights."""
        if self._dtype is None:
            return
        for parameter in self._model.parameters():
            if parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()
        adapter = find_adapter(self._model)
        if adapter is None:
            return
        drop_casts(self._model)
        for parameter in find_frozen_weights(self._model) if adapter.base is not None else ():
            parameter.data = parameter.data.to(self._dtype)

    def _cut(self) -> None:
        """Leave one block of each kind, and the first of each stack, which may prepare for all."""
        kept = {kind.chosen for kind in self._kinds}
        stacks = {kind.stack for kind in self._kinds}
        kept |= {next(n for n in self._plan.blocks if n.rpartition(".")[0] == s) for s in stacks}
        self._followed = [name for name in self._plan.blocks if name in kept]
        self._modules = {name: self._model.get_submodule(name) for name in self._followed}
        for stack in stacks:
            parent, _, own = stack.rpartition(".")
            blocks = [self._modules[n] for n in self._followed if n.rpartition(".")[0] == stack]
            setattr(self._model.get_submodule(parent), own, nn.ModuleList(blocks))

    def _list_points(self) -> list[tuple[int, int]]:
        rows, length = self._rows, self._length
        other = max(rows // 2, 1) if rows > 1 else 2
        points = [(rows, length), (other, length)]
        return [*points, (rows, length // 2)] if length >= 16 else points

    def _trace(self, rows: int, length: int) -> dict[str, Segment]:
        """The passes of one micro-batch."""
        batch = _resize(self._batch, (self._rows, self._length), (rows, length))
        tracing = Tracing()
        types = GpuTypes(self._dtype, tracing.note_cast)
        handles = [*self._follow_blocks(tracing), *self._follow_rest(tracing)]
        handles += [
            p.register_post_accumulate_grad_hook(lambda p: tracing.forget(p.grad))
            for p in self._model.parameters()
            if p.requires_grad
        ]
        try:
            with tracing, types:
                tracing.enter("forward before")
                loss = self._run.forward(batch)
                types.end_call()
                tracing.end_forward()
                tracing.enter("backward after")
                loss.backward()
                del loss
                tracing.enter("end")
        except RapidformerError:
            raise
        except Exception as error:
            raise RapidformerError(
                f"the forward step of {type(self._model).__name__} cannot be followed without "
                f"values: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
            for parameter in self._model.parameters():
                parameter.grad = None
        return tracing.segments

    def _follow_blocks(self, tracing: Tracing) -> list[Any]:
        """Tell the segments of the blocks apart, in both passes."""
        last, handles = self._followed[-1] if self._followed else "", []

        def begin(name: str, args: Any, kwargs: Any) -> None:
            self._calls.setdefault(name, (args, kwargs))
            tracing.enter(f"forward {name}")
            hidden = _find_trained((args, kwargs))
            if hidden is not None:
                tracing.segments[f"forward {name}"].inputs = hidden.numel() * hidden.element_size()
                hidden.register_hook(lambda _: tracing.leave(f"backward {name}", "backward before"))

        def end(name: str, output: Any) -> None:
            tracing.enter("forward after" if name == last else "forward before")
            hidden = _find_trained(output)
            if hidden is not None:
                hidden.register_hook(lambda _: tracing.enter(f"backward {name}"))

        for name, module in self._modules.items():
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: begin(name, args, kwargs), with_kwargs=True
                )
            )
            handles.append(
                module.register_forward_hook(lambda _, args, output, name=name: end(name, output))
            )
        return handles

    def _follow_rest(self, tracing: Tracing) -> Iterator[Any]:
        """Note what tensor parallelism would split, and what is used after the blocks."""
        for module, is_split in self._rules.list_edges():

            def see(_: Any, args: Any, output: Any, is_split: bool = is_split) -> None:
                tracing.set_split(output, is_split=is_split)

            yield module.register_forward_hook(see)

        def see_call(module: nn.Module, args: Any) -> None:
            if tracing.name == "forward after":
                self._used_after.update(map(id, module.parameters(recurse=False)))

        for module in self._model.modules():
            yield module.register_forward_pre_hook(see_call)

    def _time(self, kind: _Kind, trace: dict[str, Segment], timer: BlockTimer) -> Timed | None:
        seconds = timer(self._modules[kind.chosen], *self._calls[kind.chosen])
        if seconds is None:
            return None
        passes = [trace[f"{way} {kind.chosen}"] for way in ("forward", "backward")]
        names = ("matrix_flops", "attention_flops", "moved", "operations")
        work: Any = {name: sum(getattr(each, name) for each in passes) for name in names}
        return Timed(seconds=seconds, load=Load(**work))


class _Fit:
    """Costs from what was counted at several sizes."""

    def __init__(self, points: list[tuple[int, int]], traces: list[dict[str, Segment]]) -> None:
        self._points, self._traces = points, traces

    def build(self, name: str, **known: Any) -> Part:
        """The part of one block, or of what is before or after them."""
        forward, backward = f"forward {name}", f"backward {name}"
        first = self._traces[0]

        def fit(read: Callable[[Segment, Segment], float]) -> Cost:
            return self._solve([read(trace[forward], trace[backward]) for trace in self._traces])

        flops = first[forward].matrix_flops + first[forward].attention_flops
        all_flops = flops + first[backward].matrix_flops + first[backward].attention_flops
        saved = fit(lambda f, b: f.saved)
        if known.get("saved_compiled") is None:
            known["saved_compiled"] = saved
        return Part(
            saved=saved, saved_split=fit(lambda f, b: f.split), casts=fit(lambda f, b: f.casts),
            saved_selective=fit(lambda f, b: f.products), inputs=fit(lambda f, b: f.inputs),
            forward_peak=fit(lambda f, b: f.peak), backward_peak=fit(lambda f, b: b.peak),
            matrix_flops=fit(lambda f, b: f.matrix_flops + b.matrix_flops),
            attention_flops=fit(lambda f, b: f.attention_flops + b.attention_flops),
            forward_share=flops / all_flops if all_flops else 1 / 3,
            moved=fit(lambda f, b: f.moved + b.moved),
            operations=first[forward].operations + first[backward].operations,
            **known,
        )  # fmt: skip

    def _solve(self, values: list[float]) -> Cost:
        (rows, length), (other, _) = self._points[:2]
        per_row = (values[0] - values[1]) / (rows - other)
        constant = max(values[0] - rows * per_row, 0.0)
        per_row = (values[0] - constant) / rows
        if len(values) < 3:
            return Cost(constant=constant, per_token=per_row / length)
        short = self._points[2][1]
        slope = (values[2] - constant) / rows
        per_pair = max((per_row / length - slope / short) / (length - short), 0.0)
        if per_pair * length**2 < 1e-3 * per_row:
            per_pair = 0.0  # rounding
        return Cost(
            constant=constant, per_token=per_row / length - per_pair * length, per_pair=per_pair
        )


def _list_kinds(model: nn.Module, plan: ModelPlan) -> list[_Kind]:
    """Blocks that are equal but for their values, by stack."""
    kinds: dict[Hashable, _Kind] = {}
    for name in plan.blocks:
        block, stack = model.get_submodule(name), name.rpartition(".")[0]
        shapes = tuple((n, p.shape, p.requires_grad) for n, p in block.named_parameters())
        kinds.setdefault((stack, shapes), _Kind(stack, [])).names.append(name)
    return list(kinds.values())


def _find_trained(values: Any) -> Tensor | None:
    """The hidden states among a block's inputs or outputs."""
    return next((t for t in list_tensors(values) if t.requires_grad), None)


def _find_sizes(batch: Any) -> tuple[int, int]:
    """Rows of a batch, and their length: that of its longest sequence of ids."""
    tensors = list_tensors(batch)
    if not tensors:
        raise RapidformerError("the run's batches have no tensors: there is nothing to plan by.")
    ids = [t for t in tensors if t.dim() == 2 and not t.is_floating_point()]
    rows = (ids or tensors)[0].shape[0] if (ids or tensors)[0].dim() else 1
    return rows, max((t.shape[1] for t in ids), default=1)


def _resize(batch: Any, sizes: tuple[int, int], wanted: tuple[int, int]) -> Any:
    """The same batch with other numbers of rows and tokens."""

    def change(tensor: Tensor) -> Tensor:
        for dim in range(tensor.dim()):
            size = tensor.shape[dim]
            if dim == 0 and size == sizes[0]:
                places = torch.arange(wanted[0]) % size
                tensor = tensor.index_select(0, places)
            elif dim > 0 and not tensor.is_floating_point() and size > 1 and sizes[1] > 1:
                tensor = tensor.narrow(dim, 0, max(size * wanted[1] // sizes[1], 1))
        return tensor.contiguous()

    return tree_map_only(Tensor, change, batch)


def _without_padding(batch: Any) -> Any:
    """Every token a real one: what a mask costs is counted by itself."""
    if isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[1], dict):
        return batch[0], _without_padding(batch[1])
    if not isinstance(batch, Mapping):
        return batch
    masks = [name for name in batch if name.endswith("attention_mask")]
    return {**batch, **{name: torch.ones_like(batch[name]) for name in masks}}


def _count_labelled(batch: Any) -> float:
    """The fraction of positions that have a label."""
    found = batch[1] if isinstance(batch, tuple) and len(batch) == 2 else batch
    labels = found.get("labels") if isinstance(found, Mapping) else None
    if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return 1.0
    return float((labels != -100).float().mean())


def _guess_filled(lengths: list[int], rows: int) -> float:
    """How full of tokens the fullest micro-batch of many is: beyond three standard deviations."""
    if not lengths:
        return 1.0
    numbers = torch.tensor(lengths, dtype=torch.float64)
    mean, spread = float(numbers.mean()), float(numbers.std(correction=0))
    return min((mean + 3 * spread / math.sqrt(rows)) / max(lengths), 1.0)
