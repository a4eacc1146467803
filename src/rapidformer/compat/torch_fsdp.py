"""``fully_shard``: the state behind a sharded module."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"

PRIVATE_NAMES = {
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "generating with sharded weights",
    f"{_STATE}._lazy_init": "generating with sharded weights",
    f"{_STATE}._fsdp_param_groups or {_STATE}._fsdp_param_group": "releasing gathered weights",
    "torch.Tensor._version": "seeing whether gathered weights were changed",
}


def make_root(module: FSDPModule) -> None:
    """Let the module know that it is the outermost one, before a part of it is called alone."""
    module._get_fsdp_state()._lazy_init()


def list_parameter_groups(module: FSDPModule) -> list[Any]:
    """The groups of parameters that the module gathers together; none where it has no own ones."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one at most
        group = state._fsdp_param_group
        groups = [] if group is None else [group]
    return list(groups)


def count_changes(tensor: Tensor) -> int:
    """How often the tensor was changed in place; gathering weights into it does not count."""
    return int(tensor._version)
