"""DeepSpeed's optimizers, and the shards of state that they keep."""

from __future__ import annotations

from typing import Any

import torch

_ZERO_3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_ZERO_2 = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"

PRIVATE_NAMES = {
    "deepspeed.utils.groups._release_process_group_references": "a second engine in one process",
    f"{_ZERO_2}._hp_optimizer_states_linked": "reading the optimizer state of ZeRO-1 and ZeRO-2",
    f"{_ZERO_2}._lazy_init_hp_params_optimizer_state": "reading the same state",
    f"{_ZERO_2}._optimizer_step": "filling the optimizer state before a checkpoint is loaded",
    f"{_ZERO_3}._optimizer_step": "filling the optimizer state before a checkpoint is loaded",
    f"{_ZERO_3}._get_fp32_opt_state_partition": "loading the state of ZeRO-3",
    f"{_ZERO_3}._get_param_partition_rank": "loading the state of ZeRO-3",
    f"{_ZERO_3}._get_norm_groups": "the gradient norm under ZeRO-3",
}


def forget_groups() -> None:
    """DeepSpeed keeps groups in module globals, and would reuse those of an earlier engine."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    groups._release_process_group_references(group=None)
    comm.cdb = None


def link_optimizer_state(optimizer: Any) -> None:
    """Let ZeRO-1 or ZeRO-2 find its state again: it looks once, after the first group's step."""
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


def get_piece(optimizer: Any, parameter: Any, key: str | None) -> tuple[torch.Tensor, int]:
    """This rank's fp32 shard of a weight (or of its state) under ZeRO-3, and its position."""
    piece, _ = optimizer._get_fp32_opt_state_partition(
        parameter, release_swap_buffers=False, optim_state_key=key
    )
    return piece, int(optimizer._get_param_partition_rank(parameter))


def step_group(optimizer: Any, index: int) -> None:
    """Update one group of parameters and do nothing else."""
    optimizer._optimizer_step(index)


def compute_norm(optimizer: Any) -> Any:
    """The norm of the whole gradient under ZeRO-3."""
    from deepspeed.runtime.utils import combine_grad_norm_groups

    return combine_grad_norm_groups(optimizer._get_norm_groups())
