"""Gathered weights: when they are released, so that no stale copy is used or changed.

ZeRO-1 and ZeRO-2 keep weights gathered until the end of the backward pass. After a pass without one
they would stay gathered: the optimizer would update the shards while later passes used the old
copies, and a user's change to the weights would change only the copies. So weights are resharded
after such a pass and before every update, and changes to gathered weights are copied to the shards.

A user may also call a part of the model directly, as in ``model.get_input_embeddings()(ids)``. So
each module that owns weights outside blocks gathers them for a call from outside the model, and
their gradient goes to the shards directly.
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

from rapidformer.compat.torch_dispatch import is_in_backward
from rapidformer.compat.torch_fsdp import (
    is_in_forward,
    list_owners,
    list_parameter_groups,
    make_root,
    reshard,
    wait_for_reductions,
)
from rapidformer.compat.torch_modules import get_parameter_table
from rapidformer.compat.torch_tensors import count_changes
from rapidformer.dist.whole import gather_with_gradient
from rapidformer.errors import ModelError


class GatheredWeights:
    """Reshards gathered weights before they can go stale."""

    def __init__(self, model: nn.Module, stage: int) -> None:
        self.modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self.is_kept = False
        self._versions: dict[Any, int] = {}
        if stage < 3:  # ZeRO-3 reshards after every forward pass anyway
            # Kept out of a model compiled as a whole, like torch's own hooks.
            skip = torch.compiler.disable
            model.register_forward_pre_hook(skip(lambda *_: self._keep_changes()), prepend=True)
            model.register_forward_hook(skip(self._after_forward))

    def release(self) -> None:
        """Reshard gathered weights."""
        self._keep_changes()
        for module in self.modules:
            reshard(module)

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
            # fully_shard adds to the shard's gradient on streams that autograd does not know about.
            whole.register_hook(lambda gradient: wait_for_reductions(self.modules[0]))
        return whole

    def watch_updates(self, optimizer: Optimizer) -> RemovableHandle:
        """Reshard before every update: the optimizer updates the shards."""
        return optimizer.register_step_pre_hook(_Release(self))

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        # In training, the backward pass needs the weights, and reshards them when it is done.
        if not self.is_kept and not (torch.is_grad_enabled() and model.training):
            self.release()

    def _keep_changes(self) -> None:
        """Copy a user's changes to gathered weights to the shards."""
        groups = (group for module in self.modules for group in list_parameter_groups(module))
        for group in groups:
            for parameter in group.fsdp_params if group.is_unsharded else ():
                # Gathering does not change the version counter: only a user's change does.
                whole = parameter.unsharded_param
                if whole.requires_grad != parameter.sharded_param.requires_grad:
                    parameter.sharded_param.requires_grad_(whole.requires_grad)
                version = count_changes(whole)
                if version != self._versions.setdefault(parameter, 0):
                    self._versions[parameter] = version
                    _copy_to_shard(parameter)


class _Release:
    """A hook that runs before every optimizer step."""

    may_be_skipped = True
    """Where a CUDA graph updates the shards, nothing is left gathered."""

    def __init__(self, gathered: GatheredWeights) -> None:
        self._gathered = gathered

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._gathered.release()


def _copy_to_shard(parameter: Any) -> None:
    whole = parameter.unsharded_param.detach()
    if isinstance(whole, DTensor):  # it is split by tensor parallelism as well
        whole = whole.to_local()
    mesh = parameter.mesh_info
    parts = whole.chunk(mesh.shard_mesh_size, parameter.fsdp_placement.dim)
    if mesh.shard_mesh_rank < len(parts):
        parameter.sharded_param.detach().to_local().copy_(parts[mesh.shard_mesh_rank])


def serve_outside_calls(model: nn.Module, gathered: GatheredWeights) -> None:
    """Let embeddings, norms and heads of a sharded model be called on their own."""
    assert isinstance(model, FSDPModule)
    owned: dict[nn.Module, dict[str, Any]] = {}
    for group in list_parameter_groups(model):
        for parameter in group.fsdp_params:
            for module, name in list_owners(parameter):
                owned.setdefault(module, {})[name] = parameter
    owned.pop(model, None)
    for module, parameters in owned.items():
        _serve(module, parameters, model, gathered)


def _serve(
    module: nn.Module, parameters: dict[str, Any], root: FSDPModule, gathered: GatheredWeights
) -> None:
    """Give a module its whole weights while it is called from outside the model."""
    held: list[dict[str, Any]] = []
    """What was in their place, for each call that runs."""

    def before(module: nn.Module, inputs: Any) -> None:
        held.append({})
        if not _is_outside(root, gathered):
            return
        make_root(root)
        table = get_parameter_table(module)
        for name, parameter in parameters.items():
            shard = parameter.sharded_param
            if "tensor" in (shard.device_mesh.mesh_dim_names or ()):
                raise ModelError(
                    f"a {type(module).__name__} was called outside the model, whose layers are "
                    "split by both ZeRO and tensor parallelism: call the model itself, or use "
                    "only one of the two switches."
                )
            held[-1][name] = table[name]
            table[name] = gathered.gather(shard)  # type: ignore[assignment]

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        get_parameter_table(module).update(held.pop())

    skip = torch.compiler.disable
    module.register_forward_pre_hook(skip(before), prepend=True)
    module.register_forward_hook(skip(after), always_call=True)


def _is_outside(root: FSDPModule, gathered: GatheredWeights) -> bool:
    """Whether the model itself is not running."""
    if is_in_forward(root):
        return False
    if gathered.is_kept and all(group.is_unsharded for group in list_parameter_groups(root)):
        return False
    # Recomputation in the backward pass: everything needed is gathered already.
    return not is_in_backward()
