"""torch's AdamW whose step on a GPU is two kernel launches, whatever the number of parameters.

Everything else is torch's: groups, state, checkpoints, schedules and hooks. torch also updates what
the kernel does not support.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from rapidformer.compat.torch_optimizers import step_without_hooks
from rapidformer.log import warn_once
from rapidformer.optim.multi_tensor.addresses import record_addresses
from rapidformer.optim.multi_tensor.launch import Group, Kinds, Launch, get_local
from rapidformer.optim.multi_tensor.tables import has_triton, is_recording

MOMENTS = ("exp_avg", "exp_avg_sq")
TYPES = {torch.float32, torch.bfloat16, torch.float16}
_UNSUPPORTED = ("amsgrad", "maximize", "differentiable", "capturable")


class MultiTensorAdamW(AdamW):
    """``torch.optim.AdamW(fused=True)``, faster on a GPU.

    Gradients that it divides (``grad_scale``) stay as they were; torch overwrites them.
    """

    rounds_randomly = False
    moment_dtype: torch.dtype | None = None
    """The precision of new moments; None: the weight's."""
    _launch: Launch | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._launch_step():
            self.step_on_host()
        return loss

    def step_on_host(self) -> None:
        """The step without our kernels."""
        step_without_hooks(AdamW, self)

    def _launch_step(self) -> bool:
        """Do the step with our kernels; False if they cannot."""
        for _ in range(2):
            launch = self.find_launch()
            if launch is None or is_recording(launch.device):
                return False
            if launch.prepare():
                divisor, flag = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
                launch.run(divisor, flag)
                return True
            self._launch = None  # moments were replaced by others of another precision
        return False

    @torch.no_grad()
    def find_launch(self) -> Launch | None:
        """The update of all parameters that have a gradient; None if torch must do it."""
        parameters: list[nn.Parameter] = []
        gradients: list[Tensor] = []
        numbers: list[int] = []
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    parameters.append(parameter)
                    gradients.append(gradient)
                    numbers.append(number)
        if not parameters or not all(map(_is_supported, self.param_groups)):
            return None
        if not _are_plain(gradients, parameters):
            return None
        if self._launch is None or not self._launch.fits(parameters, numbers, gradients):
            self._launch = self._build_launch(parameters, gradients, numbers)
        return self._launch

    def _build_launch(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], numbers: list[int]
    ) -> Launch | None:
        device = parameters[0].device
        if not has_triton(device):
            return None
        states = list(map(self.get_state, parameters))
        for state in states:
            # In checkpoints of optimizers that are not fused, they are on the host.
            state["step"] = state["step"].to(device, torch.float32)
        means, squares = ([state[name] for state in states] for name in MOMENTS)
        for tensors in (parameters, gradients, means, squares):
            if not _are_plain(tensors, parameters):
                return None
            if any(t.device != device or t.dtype not in TYPES for t in tensors):
                return None
        found = zip(parameters, gradients, means, strict=True)
        kinds = {Kinds(*(tensor.dtype for tensor in some)) for some in found}
        if not all(_works(device, each, self.rounds_randomly) for each in kinds):
            return None
        return Launch(self, parameters, numbers, gradients)

    def get_state(self, parameter: Any) -> dict[str, Tensor]:
        """The parameter's state, which is created as torch does if there is none."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in MOMENTS:
                state[name] = torch.zeros_like(
                    parameter, dtype=self.moment_dtype, memory_format=torch.preserve_format
                )
        return state


def _is_supported(group: Group) -> bool:
    return not any(group.get(name) for name in _UNSUPPORTED) and not isinstance(group["lr"], Tensor)


def _are_plain(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Whether the memory of tensors is laid out like that of the parameters they belong to."""
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return all(map(Tensor.is_contiguous, tensors))
    return all(
        getattr(tensor, "placements", None) == getattr(parameter, "placements", None)
        and get_local(tensor).is_contiguous()
        for tensor, parameter in zip(tensors, parameters, strict=True)
    )


@functools.cache
def _works(device: torch.device, kinds: Kinds, rounds_randomly: bool) -> bool:
    """Try the kernels on a few numbers before they change a weight."""
    try:
        _try(device, kinds, rounds_randomly)
    except Exception as error:  # whatever Triton, its compiler or the driver may raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        warn_once(
            f"the Triton kernel of AdamW cannot be used here ({reason}): torch's own runs instead, "
            "which is slower."
        )
        return False
    return True


def _try(device: torch.device, kinds: Kinds, rounds_randomly: bool) -> None:
    weight = nn.Parameter(torch.ones(19, dtype=kinds.weight, device=device))
    optimizer = MultiTensorAdamW([weight], lr=1e-3, fused=True)
    optimizer.rounds_randomly, optimizer.moment_dtype = rounds_randomly, kinds.moment
    gradient = torch.ones(19, dtype=kinds.gradient, device=device)
    launch = Launch(optimizer, [weight], [0], [gradient])
    launch.prepare()
    launch.run(gradients=[gradient])
    # A CUDA graph cannot compile this while it records.
    record_addresses([gradient.data_ptr()], device)
    if not 0.99 < float(weight[18]) < 0.9999:
        raise RuntimeError(f"1 became {float(weight[18])} instead of 0.999")
