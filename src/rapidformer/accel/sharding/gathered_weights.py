"""Gathered weights: when they are released, so that no stale copy is used or changed.

ZeRO-1 and ZeRO-2 keep weights gathered from a forward pass to the end of its backward pass. After a
pass without a backward pass (on validation data, say) they would stay gathered: the optimizer would
update the shards while later passes used the old copies, and a user's change to the weights would
change only the copies. So weights are resharded after such a pass and before every update, and
changes made to gathered weights are copied to the shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from rapidformer.compat.torch_fsdp import list_parameter_groups, wait_for_reductions
from rapidformer.compat.torch_tensors import count_changes
from rapidformer.dist.whole import gather_with_gradient


class GatheredWeights:
    """Reshards gathered weights before they can go stale."""

    def __init__(self, model: nn.Module, stage: int) -> None:
        self._modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self.is_kept = False
        self._versions: dict[Any, int] = {}
        if stage < 3:  # ZeRO-3 reshards after every forward pass anyway
            # Kept out of a model compiled as a whole, like torch's own hooks.
            skip = torch.compiler.disable
            model.register_forward_pre_hook(skip(self._before_forward), prepend=True)
            model.register_forward_hook(skip(self._after_forward))

    def release(self) -> None:
        """Reshard gathered weights."""
        self._keep_changes()
        for module in self._modules:
            module.reshard()

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Gather weights once for all forward passes inside, instead of once for each."""
        before, self.is_kept = self.is_kept, True
        try:
            yield
        finally:
            self.is_kept = before
            if not before:
                self.release()

    def gather(self, parameter: torch.Tensor) -> torch.Tensor:
        """A whole weight that is not managed by ``fully_shard``: its gradient goes to the shard."""
        whole = gather_with_gradient(parameter)
        if whole is not parameter and whole.requires_grad and whole.is_cuda:
            whole.register_hook(self._wait_for_reductions)
        return whole

    def _wait_for_reductions(self, gradient: torch.Tensor) -> None:
        # fully_shard adds to the shard's gradient on streams that autograd does not know about.
        wait_for_reductions(self._modules[0])

    def watch_updates(self, optimizer: Optimizer) -> RemovableHandle:
        """Reshard before every update: the optimizer updates the shards."""
        return optimizer.register_step_pre_hook(lambda *_: self.release())

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        self._keep_changes()

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        # In training, the backward pass needs the weights, and reshards them when it is done.
        if not self.is_kept and not (torch.is_grad_enabled() and model.training):
            self.release()

    def _keep_changes(self) -> None:
        """Copy a user's changes to gathered weights to the shards."""
        for group in self._list_groups():
            if not group.is_unsharded:
                continue
            for parameter in group.fsdp_params:
                # Gathering does not change the version counter: only a user's change does.
                whole = parameter.unsharded_param
                if whole.requires_grad != parameter.sharded_param.requires_grad:
                    parameter.sharded_param.requires_grad_(whole.requires_grad)
                version = count_changes(whole)
                if version != self._versions.setdefault(parameter, 0):
                    self._versions[parameter] = version
                    _copy_to_shard(parameter)

    def _list_groups(self) -> Iterator[Any]:
        for module in self._modules:
            yield from list_parameter_groups(module)


def _copy_to_shard(parameter: Any) -> None:
    whole = parameter.unsharded_param.detach()
    if isinstance(whole, DTensor):  # it is split by tensor parallelism as well
        whole = whole.to_local()
    mesh = parameter.mesh_info
    parts = whole.chunk(mesh.shard_mesh_size, parameter.fsdp_placement.dim)
    if mesh.shard_mesh_rank < len(parts):
        parameter.sharded_param.detach().to_local().copy_(parts[mesh.shard_mesh_rank])
