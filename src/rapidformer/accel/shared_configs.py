"""Models built from one configuration object: each composed one chooses attention by its own."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from rapidformer.accel.applied import Applied
from rapidformer.accel.context.exchanged_attention import PREFIX, find_configs
from rapidformer.accel.grouped_experts import NAME as GROUPED
from rapidformer.accel.unpad.kernels import NAME as UNPADDED
from rapidformer.compat.transformers_models import (
    get_attention,
    get_experts,
    set_attention,
    set_experts,
)
from rapidformer.overlay import list_layers


def separate_configs(model: nn.Module, applied: Applied) -> None:
    """Copy configurations in which another composed model of this process has made its choice."""
    configs = find_configs(model)
    names = [*map(get_attention, configs), *map(get_experts, configs)]
    # A copy of a composed model has its own, and layers that read it.
    if not any(str(n).startswith("rapidformer_") for n in names) or "unpad" in list_layers(model):
        return
    copied: dict[int, Any] = {}
    for module in model.modules():
        if "config" in vars(module):
            shared = module.config
            vars(module)["config"] = own = copy.deepcopy(shared, copied)
            applied.on_close(_put_back, module, own, shared)
    for config in find_configs(model):
        attention = get_attention(config).removeprefix(PREFIX)
        set_attention(config, "sdpa" if attention == UNPADDED else attention)
        if get_experts(config) == GROUPED:
            set_experts(config, "grouped_mm")


def _put_back(module: nn.Module, own: Any, shared: Any) -> None:
    if vars(module).get("config") is own:  # and not the user's
        vars(module)["config"] = shared
