"""Parts of a sharded model that the user calls directly, not through the model.

``fully_shard`` gathers the weights outside blocks (embeddings, the last norm, the head) when the
model is called. A call of ``model.get_input_embeddings()(ids)`` would find their shards or, if
weights are still gathered, compute a gradient after the model's own has been reduced. So each
module that owns such weights gathers them for a call from outside, and their gradient goes to the
shards directly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rapidformer.accel.sharding.gathered_weights import GatheredWeights
from rapidformer.compat.torch_dispatch import is_in_backward
from rapidformer.compat.torch_fsdp import (
    is_in_forward,
    list_owners,
    list_parameter_groups,
    make_root,
)
from rapidformer.compat.torch_modules import get_parameter_table
from rapidformer.errors import ModelError


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
        _OutsideCall(module, parameters, model, gathered)


class _OutsideCall:
    """Gives a module its whole weights while it is called from outside the model."""

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, Any],
        root: FSDPModule,
        gathered: GatheredWeights,
    ) -> None:
        self._parameters = parameters
        self._root = root
        self._gathered = gathered
        self._held: list[dict[str, Any]] = []
        skip = torch.compiler.disable
        module.register_forward_pre_hook(skip(self._before), prepend=True)
        module.register_forward_hook(skip(self._after), always_call=True)

    def _before(self, module: nn.Module, inputs: Any) -> None:
        """Gather the module's weights, if the model itself is not running."""
        held: dict[str, Any] = {}
        self._held.append(held)
        if not self._is_outside():
            return
        make_root(self._root)
        table = get_parameter_table(module)
        for name, parameter in self._parameters.items():
            shard = parameter.sharded_param
            if "tensor" in (shard.device_mesh.mesh_dim_names or ()):
                raise ModelError(
                    f"a {type(module).__name__} was called outside the model, whose layers are "
                    "split by both ZeRO and tensor parallelism: call the model itself, or use "
                    "only one of the two switches."
                )
            held[name] = table[name]
            table[name] = self._gathered.gather(shard)  # type: ignore[assignment]

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for name, parameter in self._held.pop().items():
            get_parameter_table(module)[name] = parameter

    def _is_outside(self) -> bool:
        if is_in_forward(self._root):
            return False
        if self._gathered.is_kept and all(
            group.is_unsharded for group in list_parameter_groups(self._root)
        ):
            return False
        # Recomputation in the backward pass: everything needed is gathered already.
        return not is_in_backward()
