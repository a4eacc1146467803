"""``fully_shard``: the state behind a sharded module."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule

PRIVATE_NAMES = {
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "generating with sharded weights",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init": (
        "generating with sharded weights"
    ),
}


def make_root(module: FSDPModule) -> None:
    """Let the module know that it is the outermost one, before a part of it is called alone."""
    module._get_fsdp_state()._lazy_init()
