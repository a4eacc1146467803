"""torch's AdamW with a step of two launches on a GPU; torch does what the kernel cannot."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from rapidformer.compat.torch_optimizers import step_without_hooks
from rapidformer.compat.triton import has_triton, on_device, works_later
from rapidformer.dist.whole import get_shard
from rapidformer.optim.multi_tensor import norm
from rapidformer.optim.multi_tensor.launch import Dtype, Kinds, Launch, record_addresses
from rapidformer.optim.multi_tensor.tables import TYPES, are_plain, is_recording

MOMENTS = ("exp_avg", "exp_avg_sq")
_UNSUPPORTED = ("amsgrad", "maximize", "differentiable", "capturable")


class MultiTensorAdamW(AdamW):
    """``torch.optim.AdamW(fused=True)``, faster; gradients that it divides stay as they were."""

    rounds_randomly = False
    moment_dtype: torch.dtype | None = None
    """The precision of new moments; None: the weight's."""
    may_launch = True
    """Whether it may use our kernels."""
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._launch = None  # it would keep the earlier moments in memory

    def start_trials(self) -> None:
        """Compile this optimizer's and the norm's kernels in the background.

        Call it when the data's worker processes have been started. A process forked while a kernel
        is compiled may inherit a pipe of the compiler, which then never ends.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        if not self.may_launch:
            return
        for device, dtype in {(p.device, p.dtype) for p in parameters}:
            if has_triton(device) and dtype in TYPES:
                kinds = Kinds(dtype, dtype, self.moment_dtype or dtype)
                _start_trial(device, kinds, self.rounds_randomly)
        norm.start_trials(parameters)

    def step_on_host(self) -> None:
        """The step without our kernels."""
        step_without_hooks(AdamW, self)

    def _launch_step(self) -> bool:
        """Do the step with our kernels; False if they cannot."""
        for _ in range(2):
            gradients = self._list_gradients()
            launch = self._find_launch(gradients)
            if launch is None or is_recording(launch.device):
                return False
            if launch.prepare():
                divisor, flag = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
                launch.run(divisor, flag, [g for g in gradients if g is not None])
                return True
            self._launch = None  # the optimizer has other state now
        return False

    def find_launch(self) -> Launch | None:
        """The update of all parameters that have a gradient; None if torch must do it."""
        return self._find_launch(self._list_gradients())

    def _list_gradients(self) -> list[Tensor | None]:
        return [p.grad for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def _find_launch(self, gradients: Sequence[Tensor | None]) -> Launch | None:
        if not self.may_launch:
            return None
        for group in self.param_groups:
            if any(map(group.get, _UNSUPPORTED)) or isinstance(group["lr"], Tensor):
                return None
        parameters = [p for group in self.param_groups for p in group["params"]]
        kinds = [None if gradient is None else gradient.dtype for gradient in gradients]
        if self._launch is None or not self._launch.fits(parameters, kinds):
            self._launch = self._build_launch(parameters, kinds)
        launch, present = self._launch, [g for g in gradients if g is not None]
        if launch is None or not _are_laid_out_like(launch.parameters, present, launch.is_sharded):
            return None
        return launch

    def _build_launch(
        self, parameters: Sequence[nn.Parameter], gradient_kinds: Sequence[Dtype | None]
    ) -> Launch | None:
        pairs = zip(parameters, gradient_kinds, strict=True)
        trained = [(p, kind) for p, kind in pairs if kind is not None]
        device = trained[0][0].device if trained else torch.device("cpu")
        if not has_triton(device):
            return None
        kinds = set()
        for parameter, gradient_kind in trained:
            state = self.get_state(parameter)
            # In checkpoints of optimizers that are not fused, it is on the host.
            state["step"] = state["step"].to(device, torch.float32)
            moments = [state[name] for name in MOMENTS]
            if not _are_laid_out_like([parameter] * 3, [parameter, *moments]):
                return None
            if any(tensor.device != device for tensor in (parameter, *moments)):
                return None
            if len({moment.dtype for moment in moments}) > 1:
                return None
            kinds.add(Kinds(parameter.dtype, gradient_kind, moments[0].dtype))
        if not all(_works(device, some, self.rounds_randomly) for some in kinds):
            return None
        return Launch(self, parameters, gradient_kinds)

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


def _are_laid_out_like(
    parameters: Sequence[Tensor], tensors: Sequence[Tensor], are_sharded: bool = True
) -> bool:
    """Whether tensors lie in memory as the parameters they belong to must."""
    if not are_sharded:
        return are_plain(tensors)
    are_split_alike = all(
        getattr(tensor, "placements", None) == getattr(parameter, "placements", None)
        for tensor, parameter in zip(tensors, parameters, strict=True)
    )
    return are_split_alike and are_plain(list(map(get_shard, tensors)))


def _works(device: torch.device, kinds: Kinds, rounds_randomly: bool) -> bool:
    return TYPES.issuperset(kinds) and _start_trial(device, kinds, rounds_randomly).result()


@functools.cache
def _start_trial(device: torch.device, kinds: Kinds, rounds_randomly: bool) -> Future[bool]:
    """Try the kernels on a few numbers before they change a weight."""
    trial = functools.partial(_try, device, kinds, rounds_randomly)
    return works_later("AdamW", device, trial)


def _try(device: torch.device, kinds: Kinds, rounds_randomly: bool) -> None:
    weight = nn.Parameter(torch.ones(19, dtype=kinds.weight, device=device))
    optimizer = MultiTensorAdamW([weight], lr=0.5, weight_decay=0.0, fused=True)
    optimizer.rounds_randomly, optimizer.moment_dtype = rounds_randomly, kinds.moment
    gradient = torch.ones(19, dtype=kinds.gradient, device=device)
    launch = Launch(optimizer, [weight], [kinds.gradient])
    launch.prepare()
    launch.run(gradients=[gradient])
    # A CUDA graph cannot compile this while it records.
    with on_device(device):
        record_addresses([gradient.data_ptr()], device)
    if not 0.49 < float(weight[18]) < 0.51:
        raise RuntimeError(f"a weight became {float(weight[18]):g} instead of 0.5")
