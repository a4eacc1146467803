"""Linear layers of compiled blocks under autocast: fewer and larger kernels.

Autocast rounds every weight by itself, multiplies once per layer, and widens every gradient from 16
bits to fp32. Here one kernel rounds all weights of a block; layers with the same input (query, key
and value, or the two halves of a gated MLP) are one product; and gradients of weights come out of
their product in fp32, so they are never rounded to 16 bits.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

from rapidformer.accel.compile.composite import define_composite
from rapidformer.compat.torch_compile import (
    find_example,
    get_example,
    is_autocast_change,
    is_gradient_change,
)
from rapidformer.compat.torch_dispatch import is_mutable
from rapidformer.compat.torch_tensors import copy_all, get_storage_key, has_storage

_ALIGNMENT = 64
"""Elements: products read weights from addresses that are multiples of 16 bytes."""

_IN_PLACE = {"setitem", "triton_kernel_wrapper_mutation"} | {
    name.strip("_")
    for name in dir(operator)
    if name.startswith("__i") and hasattr(operator, f"__{name[3:]}")
}
"""Calls in a graph that change a tensor: ``x **= 2`` is ``ipow``."""


@dataclass(frozen=True)
class _Layer:
    """One call of a linear layer in a graph."""

    node: Node
    weight: Node
    bias: Node | None
    is_transposed: bool
    """Whether the weight has inputs x outputs, as GPT-2's has."""

    @property
    def input(self) -> Any:
        return self.node.args[1 if self.is_transposed else 0]


class Product(NamedTuple):
    """Layers computed as one product, and where their parameters are in the rounded buffer."""

    weight: int
    bias: int | None
    inputs: int
    outputs: Sequence[int]
    is_transposed: bool


def merge_linears(module: GraphModule) -> None:
    """Rewrite the graph of a block under autocast; rounded weights stay until the backward pass."""
    graph = module.graph
    layers = list(_find_layers(graph))
    if not layers:
        return
    device = get_example(layers[0].weight).device
    if not torch.is_autocast_enabled(device.type):
        return
    separating = [node for node in graph.nodes if _separates_layers(node)]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    parameters = {_find_memory(n) for n in inputs if isinstance(get_example(n), nn.Parameter)}
    written = {_find_memory(each) for node in separating for each in _list_written(node)}
    if not parameters.isdisjoint(written - {None}):
        return  # a layer must see what the block has written into its weight
    groups = _group(layers, may_merge=not separating)
    dtype = torch.get_autocast_dtype(device.type)
    starts, size = _lay_out(groups)
    with graph.inserting_before(layers[0].node):
        rounded = graph.call_function(
            round_weights, (list(starts), list(starts.values()), size, dtype)
        )
    for group in groups:
        _replace(graph, group, rounded, starts)
    graph.lint()
    module.recompile()


def _find_layers(graph: Graph) -> Iterator[_Layer]:
    """Linear layers with fp32 weights, outside regions that change autocast."""
    depth = 0
    for node in graph.nodes:
        depth += is_autocast_change(node)
        layer = _read_layer(node) if depth == 0 else None
        if layer is not None:
            yield layer


def _read_layer(node: Node) -> _Layer | None:
    """The layer that a node calls: ``linear``, or the ``addmm`` of GPT-2's Conv1D."""
    arguments = (*node.args, None)[:3]
    if node.op != "call_function" or node.kwargs or len(arguments) < 3:
        return None
    if node.target is functional.linear:
        _, weight, bias = arguments
    elif node.target is torch.addmm:
        bias, _, weight = arguments
    else:
        return None
    if not _is_plain_weight(weight, 2) or not (bias is None or _is_plain_weight(bias, 1)):
        return None
    return _Layer(node, weight, bias, is_transposed=node.target is torch.addmm)


def _is_plain_weight(node: Any, dimensions: int) -> TypeGuard[Node]:
    """A trained parameter of the block in fp32."""
    if not isinstance(node, Node) or node.op != "placeholder":
        return False
    value = get_example(node)
    return (
        isinstance(value, Tensor)
        and not isinstance(value, DTensor)
        and value.dtype is torch.float32
        and value.dim() == dimensions
        and value.is_leaf
        and value.requires_grad
        and value.is_contiguous()
    )


def _separates_layers(node: Node) -> bool:
    """Whether a call may change the input that layers share, or turn off gradients for some."""
    if node.op not in ("call_method", "call_function"):
        return False
    if is_gradient_change(node):
        return True
    name = _get_name(node)
    is_in_place = name.endswith("_") and not name.endswith("__")
    if is_in_place or name.strip("_") in _IN_PLACE or node.kwargs.get("out") is not None:
        return True
    if is_mutable(node.target):
        return True
    module = getattr(node.target, "__module__", None)
    if not callable(node.target) or module != functional.__name__:
        return False
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    return bool(bound.arguments.get("inplace"))


def _list_written(node: Node) -> list[Node]:
    """What a call may change: its first argument and ``out``, or any of a custom operator's."""
    if is_mutable(node.target) or _get_name(node) == "triton_kernel_wrapper_mutation":
        return node.all_input_nodes
    targets = (*node.args[:1], node.kwargs.get("out"))
    return [target for target in targets if isinstance(target, Node)]


def _find_memory(node: Node) -> int | None:
    """An id of the memory behind a node's tensor, which its views share."""
    value = find_example(node)
    is_plain = isinstance(value, Tensor) and has_storage(value)
    return get_storage_key(value) if is_plain else None


def _get_name(node: Node) -> str:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _group(layers: Sequence[_Layer], *, may_merge: bool) -> list[list[_Layer]]:
    """Layers with the same input; others on their own."""
    groups: dict[Any, list[_Layer]] = {}
    seen: set[Node | None] = set()
    for layer in layers:
        parameters = {layer.weight, layer.bias} - {None}
        is_shared = not seen.isdisjoint(parameters)
        seen |= parameters
        is_alone = layer.is_transposed or is_shared or not may_merge
        key = layer.node if is_alone else (layer.input, layer.bias is None)
        groups.setdefault(key, []).append(layer)
    return list(groups.values())


def _lay_out(groups: Sequence[Sequence[_Layer]]) -> tuple[dict[Node, int], int]:
    """Where each parameter starts in the buffer: those of a group follow each other."""
    starts: dict[Node, int] = {}
    size = 0
    for group in groups:
        for kind in ("weight", "bias"):
            size = -(-size // _ALIGNMENT) * _ALIGNMENT
            for node in (getattr(layer, kind) for layer in group):
                if node is not None and node not in starts:
                    starts[node] = size
                    size += get_example(node).numel()
    return starts, size


def _replace(graph: Graph, group: Sequence[_Layer], rounded: Node, starts: dict[Node, int]) -> None:
    """Replace the layers of a group by one product."""
    first = group[0]
    shape = get_example(first.weight).shape
    column = 1 if first.is_transposed else 0
    product = Product(
        weight=starts[first.weight],
        bias=None if first.bias is None else starts[first.bias],
        inputs=shape[1 - column],
        outputs=[get_example(layer.weight).shape[column] for layer in group],
        is_transposed=first.is_transposed,
    )
    parameters = [layer.weight for layer in group]
    parameters += [layer.bias for layer in group if layer.bias is not None]
    with graph.inserting_before(first.node):
        outputs = graph.call_function(multiply, (first.input, rounded, parameters, *product))
    for number, layer in enumerate(group):
        with graph.inserting_before(layer.node):
            output = graph.call_function(getitem, (outputs, number))
        output.meta = dict(layer.node.meta)
        layer.node.replace_all_uses_with(output)
        graph.erase_node(layer.node)


def _multiply(
    input: Tensor, rounded: Tensor, parameters: Sequence[Tensor], weight: int, bias: int | None,
    inputs: int, outputs: Sequence[int], is_transposed: bool,
) -> list[Tensor]:  # fmt: skip
    """The outputs of layers with the same input. All but the tensors describe a ``Product``."""
    product = Product(weight, bias, inputs, outputs, is_transposed)
    output: Tensor = _Multiply.apply(input.to(rounded.dtype), rounded, product, *parameters)
    return list(output.split(outputs, dim=-1)) if len(outputs) > 1 else [output]


multiply = define_composite("multiply_rounded", _multiply)


class _Multiply(torch.autograd.Function):
    """A product with rounded weights, whose gradient goes to the fp32 ones."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, rounded: Tensor, product: Product, *parameters: Tensor
    ) -> Tensor:
        weight, bias = _read(rounded, product)
        ctx.save_for_backward(input, rounded)
        ctx.product = product
        return functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, rounded = ctx.saved_tensors
        product: Product = ctx.product
        weight, bias = _read(rounded, product)
        rows = gradient.reshape(-1, gradient.shape[-1])
        inputs = input.reshape(-1, input.shape[-1])
        to_input = (rows @ weight).reshape(input.shape) if ctx.needs_input_grad[0] else None
        if product.is_transposed:
            to_weights: Sequence[Tensor] = (multiply_to_fp32(inputs.t(), rows),)
        else:
            to_weights = multiply_to_fp32(rows.t(), inputs).split(product.outputs)
        to_biases = () if bias is None else rows.sum(0, dtype=torch.float32).split(product.outputs)
        return to_input, None, None, *to_weights, *to_biases


def _read(rounded: Tensor, product: Product) -> tuple[Tensor, Tensor | None]:
    """Weight (outputs x inputs) and bias of a product."""
    count = sum(product.outputs)
    flat, inputs = rounded[product.weight : product.weight + count * product.inputs], product.inputs
    weight = flat.view(inputs, count).t() if product.is_transposed else flat.view(count, inputs)
    return weight, None if product.bias is None else rounded[product.bias : product.bias + count]


def _round_weights(
    weights: Sequence[Tensor], starts: Sequence[int], size: int, dtype: torch.dtype
) -> Tensor:
    """All weights in 16 bits, in one buffer."""
    detached = [weight.detach() for weight in weights]
    return _round_together(detached, starts, size, dtype)


round_weights = define_composite("round_weights", _round_weights)


@torch.library.custom_op("rapidformer::round_together", mutates_args=())
def _round_together(
    weights: Sequence[Tensor], starts: Sequence[int], size: int, dtype: torch.dtype
) -> Tensor:
    rounded = torch.empty(size, dtype=dtype, device=weights[0].device)
    pieces = [
        rounded[start : start + weight.numel()].view(weight.shape)
        for start, weight in zip(starts, weights, strict=True)
    ]
    copy_all(pieces, weights)
    return rounded


@_round_together.register_fake
def _(weights: Sequence[Tensor], starts: Sequence[int], size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device=weights[0].device)


@torch.library.custom_op("rapidformer::multiply_to_fp32", mutates_args=())
def multiply_to_fp32(left: Tensor, right: Tensor) -> Tensor:
    """The product of two 16-bit matrices in fp32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


@multiply_to_fp32.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1], dtype=torch.float32)
