"""Find out where a model uses the parameters outside its blocks.

One forward pass of a few tokens, in which every block only records its inputs and returns a new
tensor, and parameters are single numbers. Autograd then says which of them each block's inputs, and
the model's output, depend on. The model's own code between blocks runs, so what it does there (a
bias that all blocks share, say) is seen too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rapidformer.accel.tensor.styles import get_first
from rapidformer.data.nested import iterate_tensors
from rapidformer.errors import ModelError
from rapidformer.models.evaluation_mode import evaluation_mode
from rapidformer.models.plan import ModelPlan
from rapidformer.models.tensor_plans import describe_other_splits
from rapidformer.models.towers import is_inside
from rapidformer.overlay import extend, remove

# As many rows as tokens: a multiple-choice model takes the second size for the number of choices,
# and regroups its rows by it.
_ROWS, _TOKENS = 4, 4


@dataclass(kw_only=True)
class Usage:
    """Where parameters outside blocks are used, and what blocks return."""

    blocks_of: dict[str, set[int]]
    """A parameter's name -> the blocks whose stages need it; empty: unknown, so all of them do."""
    tuple_size: int = 0
    """How many values the model expects of a block; 0: the hidden state itself."""


@dataclass(eq=False)
class _Recorder:
    """The inputs of the blocks in one hollow forward pass."""

    tuple_size: int
    hidden: list[Tensor] = field(default_factory=list)
    """Each block's hidden state, in order."""
    others: list[list[Tensor]] = field(default_factory=list)
    """Each block's other tensors: masks, positions, biases."""
    returned: list[Tensor] = field(default_factory=list)
    """The new tensors that they returned."""
    order: list[int] = field(default_factory=list)

    def note(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of a block, and return a new tensor in place of its output."""
        hidden = get_first(args, kwargs)
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
            if self.hidden:
                raise _WrongFormError
            raise ModelError(f"the first argument of block {index} is not a hidden state")
        if self.hidden and hidden.shape != self.hidden[0].shape:
            raise _WrongFormError
        self.order.append(index)
        self.hidden.append(hidden)
        self.others.append([t for t in iterate_floats((args, kwargs)) if t is not hidden])
        fresh = hidden.detach().clone().requires_grad_()
        self.returned.append(fresh)
        return form_output(fresh, self.tuple_size)


class _WrongFormError(Exception):
    """The model expects tuples from its blocks and got tensors, or vice versa."""

    def __str__(self) -> str:
        return "not every block gets the output of the one before"


def form_output(hidden: Tensor, tuple_size: int) -> Any:
    """A block's output that has a hidden state and nothing else."""
    return (hidden, *[None] * (tuple_size - 1)) if tuple_size else hidden


def find_usage(model: nn.Module, plan: ModelPlan) -> Usage:
    """Run the hollow forward pass; an error says what the plan should declare instead."""
    prefixes = tuple(f"{block}." for block in plan.blocks)
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    outside = [name for name in names if not name.startswith(prefixes)]
    if plan.before or plan.after:
        return _read_plan(outside, plan)
    inputs = _build_inputs(model)
    problem: Exception | None = None
    for tuple_size in range(3):
        try:
            return _run_hollow(model, plan, outside, inputs, tuple_size)
        except Exception as reason:  # whatever the model's own code may raise
            # Report a model's own error, and ours above all; the other form's complaint says
            # nothing.
            is_better = isinstance(reason, ModelError) and not isinstance(problem, ModelError)
            if problem is None or isinstance(problem, _WrongFormError) or is_better:
                problem = reason
    raise ModelError(_explain(model, plan, problem)) from problem


def _read_plan(outside: Sequence[str], plan: ModelPlan) -> Usage:
    """What the model's own plan says; a name in both lists is used on both sides."""
    sides = {0: plan.before, len(plan.blocks) - 1: plan.after}
    return Usage(
        blocks_of={n: {block for block in sides if is_inside(n, sides[block])} for n in outside}
    )


def _run_hollow(
    model: nn.Module,
    plan: ModelPlan,
    outside: Sequence[str],
    inputs: Mapping[str, Any],
    tuple_size: int,
) -> Usage:
    """Run the forward pass with single numbers as parameters, and see what depends on which."""
    recorder = _Recorder(tuple_size)
    known = dict(model.named_parameters(remove_duplicate=False))
    dtypes = {n: known[n].dtype if known[n].is_floating_point() else torch.float32 for n in outside}
    leaves = {n: torch.zeros((), dtype=dtype, requires_grad=True) for n, dtype in dtypes.items()}
    stand_ins = {name: leaf.expand(known[name].shape) for name, leaf in leaves.items()}
    buffers = {
        name: torch.zeros(b.shape, dtype=b.dtype) if b.is_meta else b.detach().cpu()
        for name, b in model.named_buffers()
    }
    with evaluation_mode(model), torch.enable_grad(), _recording(model, plan, recorder):
        # Tied names are kept separate here on purpose: each use is found on its own.
        tensors = {**stand_ins, **buffers}
        output = functional_call(model, tensors, (), dict(inputs), tie_weights=False)
    if recorder.order != list(range(len(plan.blocks))):
        raise ModelError("its blocks do not run one after the other, each once")
    usage = Usage(blocks_of={name: set() for name in outside}, tuple_size=tuple_size)
    _read_recorder(usage, recorder, leaves, list(iterate_floats(output)))
    return usage


def _read_recorder(
    usage: Usage, recorder: _Recorder, leaves: Mapping[str, Tensor], output: Sequence[Tensor]
) -> None:
    """Record where parameters are used; refuse a model that passes on more than hidden states."""
    last = len(recorder.order) - 1
    for index, (hidden, others) in enumerate(zip(recorder.hidden, recorder.others, strict=True)):
        # What happens to the hidden state between two blocks belongs to the earlier one's stage.
        _note_uses(usage, [hidden], leaves, max(index - 1, 0))
        _note_uses(usage, others, leaves, index)
        earlier = recorder.returned[: max(index - 1, 0)]
        is_chained = index == 0 or _is_made_from([hidden], recorder.returned[index - 1 : index])
        if not is_chained or _is_made_from([hidden], earlier):
            raise ModelError(
                f"block {index} gets more or other than the output of the block before it"
            )
        if _is_made_from(others, recorder.returned[:index]):
            raise ModelError(f"block {index} gets more from other blocks than its hidden state")
    _note_uses(usage, output, leaves, last)
    if _is_made_from(output, recorder.returned[:last]):
        raise ModelError("its output depends on several blocks, not only on the last")


def _note_uses(
    usage: Usage, tensors: Sequence[Tensor], leaves: Mapping[str, Tensor], block: int
) -> None:
    gradients = _differentiate(tensors, list(leaves.values()))
    for name, gradient in zip(leaves, gradients, strict=True):
        if gradient is not None:
            usage.blocks_of[name].add(block)


def _is_made_from(tensors: Sequence[Tensor], sources: list[Tensor]) -> bool:
    # A block that gets exactly the tensor of another one has it as its source, too.
    if any(tensor is source for tensor in tensors for source in sources):
        return True
    return any(gradient is not None for gradient in _differentiate(tensors, sources))


def _differentiate(tensors: Sequence[Tensor], sources: list[Tensor]) -> Sequence[Tensor | None]:
    made = [t for t in tensors if t.grad_fn is not None]
    if not made or not sources:
        return [None] * len(sources)
    total = torch.stack([t.float().sum() for t in made]).sum()
    return torch.autograd.grad(total, sources, allow_unused=True, retain_graph=True)


@contextmanager
def _recording(model: nn.Module, plan: ModelPlan, recorder: _Recorder) -> Iterator[None]:
    blocks = plan.get_blocks(model)
    try:
        for index, block in enumerate(blocks):
            build = functools.partial(_build_recording, recorder=recorder, index=index)
            extend(block, "recording", build)
        yield
    finally:
        for block in blocks:
            remove(block, "recording")


def _build_recording(cls: type, recorder: _Recorder, index: int) -> dict[str, Any]:
    return {"__call__": lambda self, *args, **kwargs: recorder.note(index, args, kwargs)}


def iterate_floats(value: Any) -> Iterator[Tensor]:
    """Every floating-point tensor of a nested value."""
    return (tensor for tensor in iterate_tensors(value) if tensor.is_floating_point())


def _build_inputs(model: nn.Module) -> dict[str, Any]:
    """A few tokens (or pixels), under the names of the model's forward arguments."""
    signature = inspect.signature(model.forward)
    known = {
        name: torch.ones(_ROWS, _TOKENS, dtype=torch.long)
        for name in ("input_ids", "tokens", "ids", "attention_mask", "labels", "token_type_ids")
    }
    known["position_ids"] = torch.arange(_TOKENS).expand(_ROWS, _TOKENS)
    config = getattr(model, "config", None)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    if isinstance(size, int):
        known["pixel_values"] = torch.zeros(_ROWS, channels, size, size)
    parameters = signature.parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    needed = [name for name in needed if name in known] or needed
    main = getattr(model, "main_input_name", None)
    names = [*needed, *([main] if isinstance(main, str) and main not in needed else [])]
    return {name: known[name] for name in names if name in known}


def _explain(model: nn.Module, plan: ModelPlan, problem: Exception | None) -> str:
    why = str(problem).rstrip(".")
    lists = dict.fromkeys(name.rpartition(".")[0] for name in plan.blocks)
    what = f"--pipeline-model-parallel-size: {type(model).__name__} cannot be cut into stages"
    others = f"{describe_other_splits(model, plan)} instead."
    if len(lists) > 1:
        stacks = ", ".join(lists)
        return f"{what}: its blocks are not one stack but {len(lists)}: {stacks}. Use {others}"
    if not isinstance(problem, (ModelError, _WrongFormError)):
        lines = str(problem).strip().splitlines() or [repr(problem)]
        why = (
            "its own code fails in a trial run in which every block returns a hidden state and "
            f"nothing else ({type(problem).__name__}: {lines[0].rstrip('.')})"
        )
    return (
        f"{what}: {why}. "
        "Give it a method rapidformer_plan() that returns {'blocks': 'name.of.list', 'before': "
        "['embedding'], 'after': ['norm', 'head']}: the modules used before the first "
        f"block and after the last. Or use {others}"
    )
