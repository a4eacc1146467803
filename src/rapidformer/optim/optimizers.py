"""Optimizers from torch, with weight decay on matrices only; Muon leaves the rest to AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from rapidformer.compat.triton import has_triton
from rapidformer.config import Settings
from rapidformer.config.switches import get_switch
from rapidformer.errors import ConfigurationError
from rapidformer.models.plan import find_plan
from rapidformer.optim.bf16_adamw import Bf16AdamW
from rapidformer.optim.multi_tensor.adamw import MultiTensorAdamW


def build_optimizer(model: nn.Module, settings: Settings) -> Optimizer:
    """The optimizer described by the flags, over the model's trainable parameters."""
    if settings.lr is None:
        raise ConfigurationError("--lr is missing: the optimizer needs a learning rate.")
    groups = group_parameters(model, settings.weight_decay)
    lr = settings.lr
    if settings.optimizer == "sgd":
        # torch's fused SGD does not support sharded tensors (its fused Adam does).
        is_sharded = any(isinstance(p, DTensor) for p in _list_parameters(groups))
        fused = _can_fuse(groups) and not is_sharded
        return SGD(groups, lr=lr, momentum=settings.sgd_momentum, fused=fused)
    if settings.optimizer == "adafactor":
        return Adafactor(groups, lr=lr)
    if settings.optimizer == "muon":
        return _build_muon(model, settings, lr)
    return _build_adamw(groups, settings, lr)


def group_parameters(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices with weight decay; biases and norms (one dimension) without."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    # A pipeline stage may have nothing to train; its optimizer then has nothing to do.
    return [group for group in groups if group["params"]] or groups[:1]


def _list_parameters(groups: list[dict[str, Any]]) -> list[nn.Parameter]:
    return [p for group in groups for p in group["params"]]


def _can_fuse(groups: list[dict[str, Any]]) -> bool:
    return all(p.is_floating_point() for p in _list_parameters(groups))


def _build_adamw(groups: list[dict[str, Any]], settings: Settings, lr: float) -> Optimizer:
    betas, eps = (settings.adam_beta1, settings.adam_beta2), settings.adam_eps
    is_on = get_switch("AdamW kernel").is_on(settings)
    if settings.optimizer_state_dtype == "bf16":
        rounding = Bf16AdamW(groups, lr=lr, betas=betas, eps=eps)
        rounding.may_launch = is_on
        return rounding
    if settings.optimizer_state_dtype == "int8":
        from rapidformer.optim.int8_adamw import Int8AdamW  # torchao is an optional package

        return Int8AdamW(groups, lr=lr, betas=betas, eps=eps)
    # Without Triton, it would be torch's own under another name.
    cls = MultiTensorAdamW if is_on and _has_triton(groups) else AdamW
    return cls(groups, lr=lr, betas=betas, eps=eps, fused=_can_fuse(groups))


def uses_kernel(optimizer: Optimizer) -> bool:
    """Whether it updates parameters in our own kernel."""
    parts = optimizer._parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    return any(
        isinstance(part, MultiTensorAdamW) and part.may_launch and _has_triton(part.param_groups)
        for part in parts
    )


def _has_triton(groups: list[dict[str, Any]]) -> bool:
    devices = {p.device for p in _list_parameters(groups)}
    return bool(devices) and all(map(has_triton, devices))


def _build_muon(model: nn.Module, settings: Settings, lr: float) -> Optimizer:
    groups = group_parameters(model, settings.weight_decay)
    plan = find_plan(model)
    inside = {id(p) for block in plan.get_blocks(model) for p in block.parameters()}
    tied = {id(model.get_parameter(name)) for names in plan.tied for name in names}
    turned = inside - tied if inside else {id(p) for p in model.parameters()} - tied
    turned -= {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices, others = [], []
    for group in groups:
        matrices += [p for p in group["params"] if p.dim() == 2 and id(p) in turned]
        rest = [p for p in group["params"] if p.dim() != 2 or id(p) not in turned]
        others += [{**group, "params": rest}] if rest else []
    if not matrices:
        raise ConfigurationError(
            "--optimizer muon: the model has no weight matrices in its blocks; use adam."
        )
    muon = Muon(
        [{"params": matrices}],
        lr=lr,
        weight_decay=settings.weight_decay,
        momentum=settings.sgd_momentum,
        # Its updates have a fixed size; torch scales them to match AdamW's, so one rate fits both.
        adjust_lr_fn="match_rms_adamw",
    )
    return CombinedOptimizer([muon, _build_adamw(others, settings, lr)] if others else [muon])


class CombinedOptimizer(Optimizer):
    """Several optimizers that look like one: groups and state are shared, not copied."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self._parts = parts
        self._is_complete = False
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._is_complete = True
        self._link_parts()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_complete:
            raise ConfigurationError("--optimizer muon takes no further parameter groups.")
        super().add_param_group(param_group)

    def _link_parts(self) -> None:
        """Let each part see its own slice of the joint groups, and the joint state."""
        start = 0
        for part in self._parts:
            end = start + len(part.param_groups)
            part.param_groups = self.param_groups[start:end]
            part.state = self.state
            start = end

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._link_parts()
