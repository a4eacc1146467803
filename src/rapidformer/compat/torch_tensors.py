"""Tensors: arithmetic on many at once, the memory behind them, checks on the device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

PRIVATE_NAMES = {
    "torch._foreach_mul_": "scaling all gradients in one kernel",
    "torch.Tensor._values": "scaling sparse gradients",
    "torch._foreach_copy_": "copying all gradients in one kernel",
    "torch._foreach_norm": "the norms of all gradients in one kernel",
    "torch._utils._unflatten_dense_tensors": "the gradients in one piece of memory, by one call",
    "torch._assert_async": "refusing bad ids without waiting for the device",
    "torch.Tensor._backward_hooks": "users' hooks on parameters, which a CUDA graph would not run",
    "torch.Tensor._post_accumulate_grad_hooks": "the same",
    "torch._C._has_storage": "batches inside torch.func.vmap, whose values cannot be read",
    "torch.Tensor._base": "views: logits without values, as FSDP asks; positions of one row",
    "torch.Tensor._version": "seeing whether a gathered or offloaded tensor was changed",
    "torch._C._cuda_endAllocateToPool": "ending a failed recording, which torch leaves open",
    **{
        f"torch._C._functions.MmBackward0._saved_{name}_sym_sizes": "losses that compare rows"
        for name in ("self", "mat2")
    },
    **{
        f"torch._C._functions.{name}Backward0._saved_{what}": "what a mean is taken over"
        for name in ("NllLoss", "NllLoss2D")
        for what in ("weight", "reduction", "total_weight")
    },
    **{
        f"torch._C._functions.{name}Backward0._saved_other": "what a sum of losses is divided by"
        for name in ("Div", "Mul")
    },
    "torch.cuda._sleep": "timing kernels apart from their launches",
    "torch.UntypedStorage._cdata": "distinguishing pieces of memory while a build is recorded",
}

_VIEWS = ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ToCopyBackward0")

FACTS = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__,
    *(
        getattr(Tensor, name).__get__
        for name in (
            "shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_leaf", "is_meta",
            "is_cuda", "grad_fn", "_base", "_version",
        )
    ),
}  # fmt: skip
"""What can be asked of a tensor that has no values yet."""


def get_base(tensor: Tensor) -> Tensor:
    """The tensor that this one is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def has_storage(tensor: Tensor) -> bool:
    """Whether there is memory behind a tensor: not if it is sparse, or inside ``vmap``."""
    return bool(torch._C._has_storage(tensor))


def multiply_all(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply every tensor by one factor, in place."""
    # Rows that a sparse tensor has twice are added up later.
    torch._foreach_mul_([t._values() if t.is_sparse else t for t in tensors], factor)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source into its target."""
    torch._foreach_copy_(list(targets), list(sources))


def compute_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each tensor."""
    norms: Sequence[Tensor] = torch._foreach_norm(list(tensors), 2.0)
    return list(norms)


def cut_like(whole: Tensor, templates: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``whole`` that follow each other and have the templates' shapes."""
    return list(torch._utils._unflatten_dense_tensors(whole, templates))


def check_later(condition: Tensor, message: str) -> None:
    """Fail on the device if the condition does not hold; the host does not wait."""
    torch._assert_async(condition, message)


def locate(tensor: Tensor) -> Hashable:
    """Where a tensor's values are, and what they look like: the same for equal views."""
    # The stride of a dimension of size 1 means nothing.
    strides = [s if n > 1 else 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tuple(strides), tensor.device


def get_storage_key(tensor: Tensor) -> int:
    """An id of the memory behind a tensor: all views of a tensor have the same."""
    return int(tensor.untyped_storage()._cdata)


def get_gradient_hooks(tensor: Tensor) -> Any:
    """The table of the hooks that run when the tensor gets its gradient; None if there is none."""
    return tensor._backward_hooks


def find_product_sizes(node: Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shapes of the two matrices whose product an operation of a graph has computed."""
    if node.name() != "MmBackward0":
        return None
    return tuple(node._saved_self_sym_sizes), tuple(node._saved_mat2_sym_sizes)  # type: ignore[attr-defined]


def find_mean_count(node: Node) -> float | None:
    """What a cross-entropy of a graph is a mean over; None if this is none, or has weights."""
    return _find_count(node, 1)


def find_sum_count(node: Node) -> float | None:
    """The same for a sum."""
    return _find_count(node, 2)


def _find_count(node: Any, reduction: int) -> float | None:
    # torch has no types for what a node has saved.
    is_known = node.name() in ("NllLossBackward0", "NllLoss2DBackward0")
    if not is_known or getattr(node, "_saved_weight", None) is not None:
        return None
    is_meant = getattr(node, "_saved_reduction", None) == reduction
    return float(node._saved_total_weight) if is_meant else None


def find_factor(node: Node) -> float | None:
    """The number that an operation multiplies one tensor by; None if it does something else."""
    is_quotient = node.name() == "DivBackward0"
    other = getattr(node, "_saved_other", None)
    has_one = [child for child, _ in node.next_functions if child is not None][1:] == []
    if not (is_quotient or node.name() == "MulBackward0") or not has_one:
        return None
    if not isinstance(other, Tensor) or other.numel() != 1 or not other:
        return None
    return 1 / float(other) if is_quotient else float(other)


def is_view_of_leaf(node: Node) -> bool:
    """Whether an operation hands on a parameter, perhaps transposed or cast."""
    while node.name() in _VIEWS:
        (node, _), *_ = node.next_functions  # type: ignore[assignment]
    return hasattr(node, "variable")


def has_gradient_hooks(
    tensors: Sequence[Tensor], but: Callable[[object], bool] = lambda hook: False
) -> bool:
    """Whether a hook runs when one of the tensors gets its gradient, ``but`` those it accepts."""
    return any(
        not but(hook)
        for tensor in tensors
        for table in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
        for hook in (table or {}).values()
    )


def count_changes(tensor: Tensor) -> int:
    """How often the tensor was changed in place; gathering weights into it does not count.

    Of tensors made in inference mode, torch does not know: always 0.
    """
    return 0 if tensor.is_inference() else int(tensor._version)


def keep_gpu_waiting(seconds: float) -> None:
    """Queue a kernel that does nothing for at least as long, at any clock below 3 GHz."""
    torch.cuda._sleep(int(3e9 * seconds))


def stop_allocating(device: torch.device, pool: tuple[int, int]) -> None:
    """Close a recording's memory pool if torch left it open: it would free no cached memory."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # already closed
        torch._C._cuda_endAllocateToPool(index, pool)
