"""What a module does once its layer is split: a subclass of its own class, per style.

Parameters are DTensors on the tensor axis (under DeepSpeed plain slices); code that *reads* one
(``self.weight``, anywhere) gets this rank's slice as a plain tensor, with the right gradient behind
it (outside any module's call: the whole weight). A weight that every rank holds whole but uses on
its own slice (of heads, or of tokens) is read through ``copy_in``, which sums the ranks' gradients
in each backward pass, so accumulation adds sums and never sums twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn import functional

from rapidformer.accel.split.on_demand import join_on_demand, stand_for
from rapidformer.accel.tensor.slices import find_slice
from rapidformer.accel.unpad.on_demand import lacks_padding, map_tokens
from rapidformer.compat.torch_dispatch import is_in_backward
from rapidformer.compat.torch_modules import get_parameter_table
from rapidformer.dist.regions import (
    Group,
    copy_in,
    gather_in,
    gather_out,
    get_slice_bounds,
    scatter_out,
    slice_in,
    sum_out,
)
from rapidformer.dist.vocabulary import check_ids
from rapidformer.dist.whole import get_shard, join_parts
from rapidformer.errors import TrainingError
from rapidformer.overlay import Build, extend, get_fact, put_fact

Reading = Callable[[Tensor], Tensor]
_SEQUENCE_DIM = 1


@dataclass(eq=False)
class SequenceRegion:
    """The part of a model in which each rank holds its slice of the tokens."""

    group: Group
    length: int = 0
    """Number of tokens in the current rows."""
    is_off: bool = False
    """True while tokens stay whole: something reads them between the blocks."""

    def enter(self, hidden: Tensor) -> Tensor:
        if hidden.dim() != 3:
            raise TrainingError(
                f"--sequence-parallel: a layer of this model returns {list(hidden.shape)}, not "
                "[batch, tokens, hidden]. Remove the switch."
            )
        self.length = hidden.shape[_SEQUENCE_DIM]
        return slice_in(hidden, _SEQUENCE_DIM, self.group)

    def leave(self, hidden: Tensor) -> Tensor:
        self._check(hidden)
        return gather_out(hidden, _SEQUENCE_DIM, self.length, self.group)

    def gather(self, hidden: Tensor) -> Tensor:
        self._check(hidden)
        return gather_in(hidden, _SEQUENCE_DIM, self.length, self.group)

    def scatter(self, part: Tensor) -> Tensor:
        return scatter_out(part, _SEQUENCE_DIM, self.group)

    def _check(self, hidden: Tensor) -> None:
        start, end = get_slice_bounds(self.length, self.group)
        if hidden.shape[_SEQUENCE_DIM] != end - start:
            # Recompute runs blocks again after another forward pass has changed the length.
            raise TrainingError(
                "--sequence-parallel: a block was recomputed after another forward pass. Call "
                "engine.backward() after each forward pass, or pad both to the same length."
            )


@dataclass(kw_only=True, eq=False)
class Split:
    """What a module needs to know about its slice."""

    mesh: DeviceMesh
    readings: Mapping[str, Reading] = field(default_factory=dict)
    """How to read a whole parameter of which this rank uses only a slice."""
    length: int = 0
    """Size of the split dimension over all ranks (vocabulary)."""
    keeps_output_split: bool = False
    """True while the loss is computed from split logits, which are not joined then."""
    region: SequenceRegion | None = None
    """Set for modules inside blocks whose tokens are split in training."""
    shared_outputs: int = 0
    """How many of the last outputs, whole here, every rank uses on its own heads."""
    head: Split | None = None
    """For a model whose loss takes split logits: its head's."""
    inner: Mapping[str, nn.Module] = field(default_factory=dict)
    """For a model whose tokens are split: its blocks and their modules."""
    surroundings: SequenceRegion | None = None
    """Set if tokens are split around the module: gradients of whole weights are then summed."""

    @property
    def group(self) -> Group:
        return self.mesh.get_group()


def read_parameter(module: nn.Module, name: str) -> Tensor | None:
    """This rank's slice of a parameter, for arithmetic."""
    parameter = get_parameter_table(module)[name]
    split = get_fact(module, Split)
    placement = _find_placement(parameter, split.mesh)
    if placement is None or parameter is None:
        # At rest, sharded over data-parallel ranks too: only the code that shards reads it now.
        return parameter
    # Blocks are recomputed in a backward pass; a compiled block does not know its caller.
    if not (torch.compiler.is_compiling() or _running_calls > 0 or is_in_backward()):
        return _read_outside(parameter, placement, split)
    local = get_shard(parameter)
    if name in split.readings:
        return split.readings[name](local)
    is_among_tokens = module.training and is_split_by_tokens(split.surroundings)
    if is_among_tokens and placement.is_replicate():
        return copy_in(local, split.group)
    return local


def _find_placement(parameter: Any, mesh: DeviceMesh) -> Placement | None:
    if isinstance(parameter, DTensor):
        return parameter.placements[0] if parameter.device_mesh == mesh else None
    slice_ = find_slice(parameter)
    return None if slice_ is None else slice_.placement


_running_calls = 0
"""Of split modules, whose own arithmetic uses this rank's slice of a weight."""


def _read_outside(parameter: Any, placement: Any, split: Split) -> Tensor:
    """A weight in user code: whole, as in one process; for changing it, the parameter itself."""
    if placement.is_replicate() and torch.is_grad_enabled():
        return stand_for(parameter, get_shard(parameter))
    if type(placement) is not Shard or not torch.is_grad_enabled():
        # Slices in pieces: torch's own operations join them.
        return parameter
    dim, slice_ = placement.dim, find_slice(parameter)
    length = slice_.shape[dim] if slice_ is not None else parameter.shape[dim]
    return join_on_demand(get_shard(parameter), dim, length, split.group, source=parameter)


def is_split_by_tokens(region: SequenceRegion | None) -> TypeGuard[SequenceRegion]:
    """Whether ranks hold slices of the tokens there, if a module trains."""
    return region is not None and not region.is_off


def extend_class(module: nn.Module, split: Split, *styles: type) -> None:
    """Give a module the subclass that reads its parameters in slices and acts by the styles."""
    names = tuple(name for name, p in get_parameter_table(module).items() if p is not None)
    put_fact(module, split)
    extend(module, "split", _get_builder(names), styles=styles, is_shared=True)


def extend_module(module: nn.Module, style: type, place: Any) -> None:
    """Give a module the subclass that acts by a style, and what that needs to know."""
    put_fact(module, place)
    extend(module, "context", _add_nothing, styles=(style,), is_shared=True)


def _add_nothing(cls: Any) -> dict[str, Any]:
    return {}


@functools.cache
def _get_builder(names: tuple[str, ...]) -> Build:
    readers = {name: _build_reader(name) for name in names}
    return lambda cls: {**readers, "__call__": _build_call(cls)}


def _build_call(cls: Any) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return cls.__call__(module, *args, **kwargs)
        with inside_a_call():
            return cls.__call__(module, *args, **kwargs)

    return call


@contextmanager
def inside_a_call() -> Iterator[None]:
    """Code in here is a split module's own; a forward that a compiled block calls says it again."""
    global _running_calls
    _running_calls += 1
    try:
        yield
    finally:
        _running_calls -= 1


def _build_reader(name: str) -> property:
    def read(module: nn.Module) -> Tensor | None:
        return read_parameter(module, name)

    return property(read)


# ---- the styles ----------------------------------------------------------------------------------


class Style:
    """What the style classes rely on; each is placed in front of the module's own class."""

    training: bool
    weight: Tensor
    bias: Tensor | None

    def _take_whole(self, hidden: Tensor) -> Tensor:
        """A whole input of a split product; its gradients must be summed somewhere."""
        split = get_fact(self, Split)
        if self.training and is_split_by_tokens(split.region):
            return hidden  # done where the tokens were gathered
        return copy_in(hidden, split.group)

    def _sum(self, part: Tensor) -> Tensor:
        split = get_fact(self, Split)
        if self.training and is_split_by_tokens(split.region):
            return split.region.scatter(part)
        return sum_out(part, split.group)

    def _multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(self, nn.Linear):
            return functional.linear(hidden, self.weight, bias)
        # GPT-2's Conv1D: the weight is transposed.
        rows = hidden.reshape(-1, hidden.shape[-1])
        product = rows @ self.weight if bias is None else torch.addmm(bias, rows, self.weight)
        return product.view(*hidden.shape[:-1], -1)


class Colwise(Style):
    """Computes this rank's slice of the outputs."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self._multiply(self._take_whole(hidden), self.bias)


class ColwiseGathered(Style):
    """Computes this rank's slice of the outputs and joins all of them."""

    def forward(self, hidden: Tensor) -> Tensor:
        if lacks_padding(hidden):
            return map_tokens(hidden, self._join)
        split = get_fact(self, Split)
        part = self._multiply(self._take_whole(hidden), self.bias)
        if split.keeps_output_split:
            shape = (*part.shape[:-1], split.length)
            return join_parts(part, split.mesh, [Shard(part.dim() - 1)], shape)
        return gather_out(part, -1, split.length, split.group)

    def _join(self, tokens: Tensor) -> Tensor:
        split = get_fact(self, Split)
        with inside_a_call():  # with padding, it is computed after the call
            part = self._multiply(self._take_whole(tokens), self.bias)
        return gather_out(part, -1, split.length, split.group)


class Rowwise(Style):
    """Multiplies this rank's slice of the inputs; the products of all ranks are summed."""

    def forward(self, hidden: Tensor) -> Tensor:
        total = self._sum(self._multiply(hidden, None))
        bias = self.bias
        # In the sum's own precision, like a whole layer: not promoted to the bias's fp32.
        return total if bias is None else total + bias.to(total.dtype)


class RowwiseSplit(Rowwise):
    """``Rowwise`` for an input that is whole: takes this rank's slice of it first."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(slice_in(hidden, -1, get_fact(self, Split).group))


class SharedOutputs(Style):
    """A whole layer whose last outputs are used on each rank's own heads: their gradients are
    summed. The first ones go to a split layer, which handles theirs.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        split = get_fact(self, Split)
        outputs = self._multiply(hidden, self.bias)
        if self.training and is_split_by_tokens(split.region):
            return outputs  # all gradients are summed where the tokens were gathered
        own, shared = outputs.tensor_split([outputs.shape[-1] - split.shared_outputs], dim=-1)
        return torch.cat([own, copy_in(shared, split.group)], dim=-1)


class VocabularyEmbedding(Style):
    """Looks up the ids in this rank's slice of the vocabulary; others give zero."""

    def forward(self, ids: Tensor) -> Tensor:
        split = get_fact(self, Split)
        first, end = get_slice_bounds(split.length, split.group)
        # An id that no rank has would become zeros; a whole embedding refuses it.
        check_ids(ids, split.length, "an id in the batch")
        is_foreign = (ids < first) | (ids >= end)
        found = super().forward((ids - first).masked_fill(is_foreign, 0))  # type: ignore[misc]
        return sum_out(found.masked_fill(is_foreign[..., None], 0.0), split.group)


# ---- split sequences -----------------------------------------------------------------------------


class TokenGatherer(Style):
    """An attention or feed-forward layer: takes a slice of the tokens, works on all of them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        region = get_fact(self, Split).region
        if self.training and is_split_by_tokens(region):
            args, kwargs = replace_first(args, kwargs, region.gather)
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class WholeTokens(Style):
    """A layer that knows nothing of split tokens: gets all of them, and its result is split."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        region = get_fact(self, Split).region
        if not (self.training and is_split_by_tokens(region)):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        args, kwargs = replace_first(args, kwargs, region.leave)
        return replace_output(super().forward(*args, **kwargs), region.enter)  # type: ignore[misc]


class FirstBlock(Style):
    """The block before which each rank takes its slice of the tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        region = get_fact(self, Split).region
        if self.training and is_split_by_tokens(region):
            args, kwargs = replace_first(args, kwargs, region.enter)
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class LastBlock(Style):
    """The block after which the tokens are joined again."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        region = get_fact(self, Split).region
        if self.training and is_split_by_tokens(region):
            return replace_output(output, region.leave)
        return output


def replace_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change a layer's hidden states: its first argument, under any name."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = next(iter(kwargs)) if "hidden_states" not in kwargs else "hidden_states"
    return args, {**kwargs, name: change(kwargs[name])}


def get_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A layer's hidden states: its first argument, under any name."""
    return args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values())))


def replace_output(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change a layer's hidden states: its result, or the first element of it."""
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    return change(output)
