"""What a compiled block keeps for its backward pass, as torch's own partition of its graph says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rapidformer.compat.torch_compile import list_kept
from rapidformer.compat.torch_dispatch import tree_map_only
from rapidformer.models.recording import list_tensors
from rapidformer.planning.parts import Cost
from rapidformer.planning.tracing import GpuTypes


def measure_kept(
    block: nn.Module, call: tuple[Any, Any] | None, dtype: torch.dtype | None, *, rows: int,
    length: int,
) -> Cost | None:  # fmt: skip
    """What grows with what, of a call of the block in this dtype; None if torch cannot say."""
    if call is None:
        return None
    try:
        kept = _list_saved(block, *call, dtype)
    except Exception:  # a block with code that depends on values: as if it were not compiled
        return None
    own = [(shape[:-1], shape[-1]) for shape in kept]
    pairs = [size for shape, size in own if shape.count(length) > 1]
    linear = [
        size
        for shape, size in own
        if shape.count(length) <= 1 and any(n % rows == 0 for n in shape)
    ]
    return Cost(
        constant=sum(size for _, size in own) - sum(linear) - sum(pairs),
        per_token=sum(linear) / (rows * length),
        per_pair=sum(pairs) / (rows * length * length),
    )


def _list_saved(
    block: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype | None
) -> list[tuple[int, ...]]:
    """Shape and size in bytes (last) of each activation that is kept, weights and inputs apart."""
    names = [name for name, _ in block.named_parameters()]
    weights = [p.detach().requires_grad_(p.requires_grad) for p in block.parameters()]
    given = list_tensors((args, kwargs))
    inputs = [
        t.detach().to("meta").requires_grad_(t.requires_grad and t.is_floating_point())
        for t in given
    ]
    places = {id(tensor): place for place, tensor in enumerate(given)}

    def run(primals: list[Tensor]) -> Tensor:
        own = primals[len(names) :]
        replaced: Any = tree_map_only(Tensor, lambda t: own[places[id(t)]], (args, kwargs))
        with GpuTypes(dtype, lambda tensor: None, keeps_masks=False):
            output = functional_call(
                block, dict(zip(names, primals, strict=False)), replaced[0], replaced[1]
            )
        return list_tensors(output)[0]

    def join(primals: list[Tensor], tangents: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        output = run(primals)
        trained = [tensor for tensor in primals if tensor.requires_grad]
        gradients = torch.autograd.grad(output, trained, tangents[0], allow_unused=True)
        return [output], [gradient for gradient in gradients if gradient is not None]

    primals = [*weights, *inputs]
    tangent = torch.empty_like(run(primals), device="meta").detach()
    return list_kept(join, primals, [tangent], weights=len(names))
