"""``fully_shard``: the state behind a sharded module."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import FSDPModule

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam"

PRIVATE_NAMES = {
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "generating with sharded weights",
    f"{_STATE}._lazy_init": "generating with sharded weights",
    f"{_STATE}._fsdp_param_groups or {_STATE}._fsdp_param_group": "releasing gathered weights",
    f"{_STATE}._state_ctx": "calling a part of a sharded model by itself",
    f"{_STATE}._training_state": "whole weights at fixed places",
    f"{_GROUP}._to_unsharded": "whole weights at fixed places",
    f"{_GROUP}._training_state": "releasing gathered weights",
    f"{_PARAM}.free_unsharded_param": "whole weights at fixed places",
    f"{_PARAM}._sharded_param_data": "whole weights at fixed places",
    "torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState": (
        "whole weights at fixed places"
    ),
    f"{_PARAM}._module_info": "calling a part of a sharded model by itself",
    f"{_STATE}._comm_ctx": "gradients of weights gathered for a loss",
    "torch.distributed._composable_state._module_state_mapping": "taking sharding off again",
    f"{_GROUP}._module_to_pre_save_state_dict_hook_handle": "taking sharding off again",
    f"{_GROUP}._module_to_pre_load_state_dict_hook_handle": "taking sharding off again",
}


def make_root(module: FSDPModule) -> None:
    """Tell the module that it is the outermost one, before a part of it is called on its own."""
    module._get_fsdp_state()._lazy_init()


def list_parameter_groups(module: FSDPModule) -> list[Any]:
    """The groups of parameters that the module gathers together; none if it has none of its own."""
    return _list_groups(module._get_fsdp_state())


def _list_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has at most one
        group = state._fsdp_param_group
        groups = [] if group is None else [group]
    return list(groups)


def list_owners(parameter: Any) -> list[tuple[nn.Module, str]]:
    """The modules that own the parameters of such a group, each with its name for it."""
    info = parameter._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def is_in_forward(root: FSDPModule) -> bool:
    """Whether a forward pass of the module, or of a sharded part of it, is running."""
    return root._get_fsdp_state()._state_ctx.iter_forward_root is not None


def wait_for_reductions(root: FSDPModule) -> None:
    """Make the current stream wait until pending gradient reductions are added."""
    context = root._get_fsdp_state()._comm_ctx
    for stream in (context.reduce_scatter_stream, context.all_reduce_stream):
        torch.cuda.current_stream().wait_stream(stream)


def reduce_gradients_when_told(root: Any) -> None:
    """Before the first forward pass: `reduce_remaining_gradients` will end every update."""
    if hasattr(root, "set_manual_backward_finalization"):  # torch 2.15
        root.set_manual_backward_finalization(True)


def reduce_remaining_gradients(root: Any) -> None:
    """Reduce and scatter what the backward passes of an update have left, once."""
    if hasattr(root, "finalize_backward"):  # torch 2.15
        root.finalize_backward()
    else:  # torch's end of a pipeline stage, for the whole model
        from torch.distributed.pipelining import PipelineStage

        stage: Any = SimpleNamespace(submod=root)
        PipelineStage.perform_reduce_grad(stage, 1)


def reshard(module: FSDPModule) -> None:
    """Let go of gathered weights, also after a forward pass that has failed inside the module."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for group in list_parameter_groups(module):
        group._training_state = TrainingState.IDLE
    module.reshard()


def keep_memory(parameter: Any) -> None:
    """Gather a parameter of a group into the same memory from now on."""
    parameter.free_unsharded_param = lambda: None


def free_memory(parameter: Any) -> None:
    """Undo ``keep_memory``; the parameter must be sharded."""
    if "free_unsharded_param" in vars(parameter):
        del parameter.free_unsharded_param
        parameter.free_unsharded_param()


def bypass_hooks(root: FSDPModule, are_bypassed: bool = True) -> None:
    """Run modules as they are: all weights are gathered, and their gradients are the caller's.

    This is what torch does when a block is recomputed in the backward pass.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    mode = TrainingState.PRE_BACKWARD if are_bypassed else TrainingState.IDLE
    context = root._get_fsdp_state()._state_ctx
    context.iter_forward_root = None  # a pass that failed has left it
    for state in context.all_states:
        state._training_state = mode


def take_whole(module: FSDPModule) -> None:
    """Give the module its whole weights, whose memory the caller has filled."""
    for group in list_parameter_groups(module):
        group._to_unsharded()


def list_padded_shards(parameters: Sequence[Any]) -> list[torch.Tensor]:
    """This rank's part of each parameter of a group as a flat tensor, equally long on all ranks."""
    return [parameter._sharded_param_data for parameter in parameters]


def forget_sharding(module: FSDPModule) -> None:
    """Remove what ``fully_shard`` keeps outside the module, and the hooks of its first pass."""
    for group in list_parameter_groups(module):
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()
    _composable_state._module_state_mapping.pop(cast(nn.Module, module), None)
