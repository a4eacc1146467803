"""DeepSpeed as the second strategy: it holds gradients and performs updates, the engine schedules.

The model, optimizer and scheduler stay the user's own objects. The number of labels in a global
batch is known only after its last micro-batch, so micro-batches back-propagate sums; the one
division happens in the update, through the loss scale that DeepSpeed removes before it clips.
Clipping is always set explicitly, never left to DeepSpeed's default.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from rapidformer.accel.assembly import Assembly, GradientSynchronizer
from rapidformer.accel.deepspeed.package import announce_build, import_deepspeed, in_process_group
from rapidformer.accel.deepspeed.state import GatheredState
from rapidformer.accel.precision.precision import to_fp32
from rapidformer.accel.tensor.slices import find_slice
from rapidformer.compat.deepspeed import compute_norm, forget_groups
from rapidformer.compat.torch_dispatch import tree_map_only
from rapidformer.compat.torch_tensors import multiply_all
from rapidformer.config.deepspeed_file import (
    build_deepspeed_config,
    find_value,
    get_file_schedule,
    has_own_precision,
    load_deepspeed_file,
    name_deepspeed_file,
    uses_our_optimizer,
)
from rapidformer.dist import mpu
from rapidformer.errors import ConfigurationError, MissingPackageError
from rapidformer.log import warn_once
from rapidformer.overlay import extend

# Elementwise optimizers, for which ZeRO may cut weights anywhere.
_ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "ASGD", "Rprop",
)  # fmt: skip
_LARGEST_BUCKET = 1024 * 488_281


def apply(assembly: Assembly) -> str | None:
    """Prepare to hand the model over."""
    assembly.synchronizer = strategy = DeepSpeedStrategy(assembly)
    assembly.needs_autocast = not strategy.keeps_precision
    return strategy.describe()


class DeepSpeedStrategy(GradientSynchronizer):
    """Connects the engine's methods to a ``DeepSpeedEngine``, which exists from ``start`` on."""

    def __init__(self, assembly: Assembly) -> None:
        args, precision = assembly.args, assembly.precision
        # Of the process, until the engine closes, or is dropped without that.
        self._changes = ExitStack()
        assembly.applied.enter(self._changes)
        self.deepspeed = import_deepspeed(assembly.device, args.log_level, self._changes)
        self.model, self.device = assembly.model, assembly.device
        self.file = name_deepspeed_file(args.deepspeed or "")
        kind = None if precision.dtype is None else precision.name
        self._content = content = load_deepspeed_file(args.deepspeed or "")
        self.keeps_precision = has_own_precision(content, kind)
        self.has_own_optimizer = not uses_our_optimizer(content)
        self.settings = build_deepspeed_config(args, kind)
        self.stage = int(self.settings["zero_optimization"]["stage"])
        # By default, DeepSpeed allocates buckets of half a billion numbers for any model.
        numbers = sum(p.numel() for p in self.model.parameters())
        size = min(_LARGEST_BUCKET, 1024 * (numbers // 1024 + 1))
        for name in ("reduce_bucket_size", "allgather_bucket_size"):
            self.settings["zero_optimization"].setdefault(name, size)
        self.engine: Any = None
        self.state: GatheredState | None = None
        """Joins weights and optimizer state; None if nothing has been sharded."""
        self._args, self._topology = args, assembly.topology
        if "activation_checkpointing" in content and not args.checkpoint_activations:
            warn_once(
                f"activation_checkpointing in {self.file} has an effect only in models that call "
                "DeepSpeed's own function: --checkpoint-activations works for all."
            )
        self._is_calling = False
        self.bypass: Callable[[], AbstractContextManager[None]] = nullcontext
        """A context manager inside which the optimizer steps at once."""
        self.num_parameters = self.num_trained = 0
        """Of the whole model, before DeepSpeed splits it."""

    def start(
        self,
        optimizer: Optimizer | None,
        groups: list[dict[str, Any]],
        bypass: Callable[[], AbstractContextManager[None]],
    ) -> Optimizer:
        """Hand the model to DeepSpeed; returns the optimizer: DeepSpeed's if the file names one."""
        self.bypass = bypass
        if optimizer is not None:
            # ZeRO-1 and -2 fail on a group in which everything is frozen, as adapters leave it.
            all_groups = optimizer.param_groups
            all_groups[:] = [g for g in all_groups if any(p.requires_grad for p in g["params"])]
        if self.has_own_optimizer:
            announce_build()
        forget_groups()
        parameters = self.model.parameters()
        sizes = [((find_slice(p) or p).shape.numel(), p.requires_grad) for p in parameters]
        self.num_parameters = sum(size for size, _ in sizes)
        self.num_trained = sum(size for size, is_trained in sizes if is_trained)
        with in_process_group(self.device):
            try:
                self.engine, *_ = self.deepspeed.initialize(
                    model=self.model,
                    optimizer=optimizer,
                    model_parameters=None if optimizer is not None else groups,
                    config=self.settings,
                    # If layers are split, it must know which ranks are replicas.
                    mpu=mpu if self._topology.tensor > 1 else None,
                )
            except Exception as reason:  # DeepSpeed's checks raise all kinds of errors
                raise self._explain(reason) from reason
        self.state = GatheredState(self) if self.stage else None
        extend(self.model, "deepspeed", self._build_members)
        started: Optimizer = self.engine.basic_optimizer
        if self.stage and self.engine.optimizer.optimizer is not started:
            raise ConfigurationError(
                f"DeepSpeed's ZeRO-{self.stage} replaces the given {type(started).__name__} by "
                "another one, which no schedule would reach: use AdamW or SGD."
            )
        return started

    def build_scheduler(self, optimizer: Optimizer, train_iters: int | None) -> Any:
        """The scheduler that the file names, for this optimizer; None if it names none."""
        schedule = get_file_schedule(self._args, train_iters)
        if schedule is None:
            return None
        from deepspeed.runtime import lr_schedules

        kind, parameters = schedule
        make = getattr(lr_schedules, kind, None) or getattr(torch.optim.lr_scheduler, kind, None)
        if make is None:
            raise ConfigurationError(f"scheduler.type {kind} in {self.file} is not known.")
        try:
            return make(optimizer, **parameters)
        except (TypeError, ValueError) as reason:
            raise ConfigurationError(f"scheduler {kind} in {self.file}: {reason}.") from None

    def describe(self) -> str:
        """One phrase for the list of switches."""
        from deepspeed import __version__

        zero = self.settings["zero_optimization"]
        replicas = self._topology.num_replicas
        over = f" over {replicas} ranks" if replicas > 1 else ""
        zero_stage = f"ZeRO-{self.stage}" if self.stage else "no ZeRO"
        parts = [f"DeepSpeed {__version__}", f"{zero_stage}{over}"]
        offloads = {name: zero.get(f"offload_{name}") or {} for name in ("optimizer", "param")}
        on_cpu = [name for name, offload in offloads.items() if offload.get("device") == "cpu"]
        if on_cpu:
            parts.append(f"{' and '.join(on_cpu)} on the CPU")
        if self.keeps_precision:
            parts.append("16-bit weights next to fp32 ones")
        return f"{', '.join(parts)} ({self.file})"

    def before_backward(self, is_last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(is_last)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Back-propagate a sum; everything DeepSpeed would divide or scale by is 1."""
        self._set_scale(1.0)
        # A new tensor: DeepSpeed takes the model's own output for a loss it has not scaled yet, and
        # would divide its gradient by the number of micro-batches.
        self.engine.backward(loss * 1.0, retain_graph=retain_graph, scale_wrt_gas=False)

    def finish(self, divisor: float) -> torch.Tensor:
        """Set the divisor for the sums over micro-batches; returns the norm after the division."""
        # DeepSpeed has already divided by the number of replicas.
        divisor = divisor / self._topology.num_replicas
        if self.stage == 0:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            multiply_all(gradients, 1.0 / divisor)
            return get_total_norm(gradients)
        self._set_scale(divisor)
        optimizer = self.engine.optimizer
        scaled = optimizer.scaled_global_norm() if self.stage < 3 else compute_norm(optimizer)
        norm = torch.as_tensor(scaled, dtype=torch.float32, device=self.device) / divisor
        return torch.where(norm < 0, torch.full_like(norm, torch.inf), norm)

    def set_clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Clip the coming update."""
        if self.stage:
            self.engine.optimizer.clip_grad = max_norm
        elif max_norm > 0:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            multiply_all(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))

    def update(self) -> None:
        """Perform the update."""
        with self.bypass():
            self.engine.step()

    def drop(self) -> None:
        """Discard a gradient that is not finite; ZeRO detects it in its update, and discards it."""
        if self.stage:
            self.update()
        else:
            self.engine.zero_grad()

    def _set_scale(self, scale: float) -> None:
        if self.stage:
            # What `override_loss_scale` does, without a log line at every call.
            self.engine.optimizer.custom_loss_scaler = True
            self.engine.optimizer.external_loss_scale = scale

    def gather_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """What all replicas have added up for a parameter, up to a factor; all must call this."""
        if not self.stage:
            return parameter.grad
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter)

    def close(self) -> None:
        """Release the process group, so that another engine can start in this process."""
        if self.engine is not None:
            self.engine.destroy()
            self.engine = None
            forget_groups()
        self._changes.close()

    def _build_members(self, cls: Any) -> dict[str, Any]:
        """The overlay of a model whose calls go through DeepSpeed's engine, which calls it."""
        half = next((p.dtype for p in self.model.parameters()), torch.float32)
        strategy = self

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(half) if tensor.dtype is torch.float32 else tensor

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if strategy._is_calling or strategy.engine is None:
                return cls.__call__(module, *args, **kwargs)
            strategy._is_calling = True
            try:
                if not strategy.keeps_precision:
                    return strategy.engine(*args, **kwargs)
                args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
                return to_fp32(strategy.engine(*args, **kwargs))
            finally:
                strategy._is_calling = False

        members: dict[str, Any] = {"__call__": call}
        if self.stage == 3 and hasattr(cls, "generate"):

            def generate(module: Any, *args: Any, **kwargs: Any) -> Any:
                # Weights are gathered in every forward pass: all ranks must do equally many.
                return cls.generate(module, *args, **{"synced_gpus": True, **kwargs})

            members["generate"] = generate
        return members

    def check_given(self, optimizer: Optimizer | None, has_schedule: bool) -> None:
        """Refuse a user's own optimizer or schedule if the file has one too."""
        sections = {"optimizer": ("an optimizer", optimizer is not None)}
        sections["scheduler"] = ("a schedule", has_schedule)
        problems = [
            f"compose() got {what}, but {self.file} has a section `{name}`: give only one of them."
            for name, (what, is_given) in sections.items()
            if is_given and find_value(self._content, f"{name}.type") is not None
        ]
        names = {cls.__name__ for cls in type(optimizer).__mro__}
        allows_any = bool(self._content.get("zero_allow_untested_optimizer"))
        is_safe = optimizer is None or names & set(_ELEMENTWISE) or allows_any
        if self.stage and not is_safe:
            problems.append(
                f"DeepSpeed's ZeRO-{self.stage} cuts weights into flat pieces of any length, which "
                f"{type(optimizer).__name__} may not support: use AdamW or SGD, or stage 0; or, if "
                f"it works elementwise, set zero_allow_untested_optimizer to true in {self.file}."
            )
        if problems:
            raise ConfigurationError(problems)

    def _explain(self, reason: Exception) -> Exception:
        """DeepSpeed's refusal in one line."""
        if isinstance(reason, (ConfigurationError, MissingPackageError)):
            return reason
        text = " ".join(str(reason).split()) or type(reason).__name__
        return ConfigurationError(f"DeepSpeed rejects {self.file}: {text}")
