"""Make the user's optimizer and scheduler follow the engine's clock.

Both keep their identity: an overlay only decides when an update happens. Sharding replaces
parameters, so an optimizer built earlier is re-pointed to the new ones by name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ReferenceType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rapidformer.compat.torch_optimizers import (
    has_step_hooks,
    mark_as_counted,
    mark_as_stepped,
    obeys_flags,
    step_divided,
)
from rapidformer.errors import RapidformerError
from rapidformer.optim.guard import LossScaler
from rapidformer.optim.update import StepDivided, UpdateClock
from rapidformer.overlay import extend, get_own_class, list_layers, remove

Closure = Callable[[], Any]


def repoint_optimizer(optimizer: Optimizer, model: nn.Module, names: Mapping[int, str]) -> None:
    """Point the optimizer to the model's current parameters, using their earlier names."""
    current = dict(model.named_parameters())
    for group in optimizer.param_groups:
        unknown = sum(id(p) not in names for p in group["params"])
        if unknown:
            raise RapidformerError(
                f"the optimizer holds {unknown} parameter{'s' * (unknown != 1)} not in the model "
                "given to compose(): build it from the parameters of that model."
            )
    before = [id(p) for group in optimizer.param_groups for p in group["params"]]
    # Those not found moved to another pipeline stage.
    replaced = {old: current[names[old]] for old in before if names[old] in current}
    if len(before) == len(replaced) and all(id(new) == old for old, new in replaced.items()):
        return
    states = optimizer.state.values()
    # All of it comes from the constructor, like Adagrad's.
    is_fresh = bool(states) and all(float(state.get("step", 1)) == 0 for state in states)
    if optimizer.state and not is_fresh:
        raise RapidformerError(
            "the optimizer has already made updates, and sharding replaces the parameters it "
            "remembers. Compose first, then restore its state:\n"
            "    model, optimizer, lr_scheduler = engine.compose(model, optimizer, ...)\n"
            "    engine.load_checkpoint(folder)"
        )
    for group in optimizer.param_groups:
        group["params"] = [replaced[id(p)] for p in group["params"] if id(p) in replaced]
    if is_fresh:
        optimizer.state.clear()
        twin: Any = type(optimizer)(optimizer.param_groups, **optimizer.defaults)
        optimizer.state.update(twin.state)


def split_groups_by_mesh(optimizer: Optimizer, ready_made: Any = None) -> None:
    """Put parameters on another mesh (experts) into own groups: torch updates one at a time."""
    for group in list(optimizer.param_groups):
        kinds: dict[DeviceMesh | None, list[nn.Parameter]] = {}
        numbers: list[nn.Parameter] = []  # torch updates them together with any mesh
        for parameter in group["params"]:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            is_number = mesh is None and parameter.dim() == 0
            (numbers if is_number else kinds.setdefault(mesh, [])).append(parameter)
        if len(kinds) < 2:
            continue
        if ready_made is not None:
            raise RapidformerError(
                "--expert-model-parallel-size gives experts parameter groups of their own, which "
                "a scheduler that was made before does not know: pass compose() a function, "
                "lr_scheduler_fn=lambda optimizer: ..., instead of lr_scheduler."
            )
        group["params"], *others = kinds.values()
        group["params"] += numbers
        optimizer.param_groups += [{**group, "params": parameters} for parameters in others]


def drop_groups(reference: ReferenceType[Optimizer], first: int, end: int) -> None:
    """Take out the groups that ``split_groups_by_mesh`` has added; a user's own may follow them."""
    optimizer = reference()
    if optimizer is not None:
        del optimizer.param_groups[first:end]


def take_over_optimizer(
    optimizer: Optimizer,
    clock: UpdateClock,
    *,
    clip_grad: float,
    scaler: LossScaler | None,
    clips_in_step: bool = False,
) -> bool:
    """Make ``step`` and ``zero_grad`` wait until an update is due.

    ``clips_in_step``: let the optimizer clip while it updates, if it can, instead of in a pass over
    all gradients before. The result may differ in the last bit. Returns whether it does.
    """
    if isinstance(optimizer, LBFGS) and (clock.num_replicas > 1 or scaler is not None):
        raise RapidformerError(
            "LBFGS decides by the loss how it goes on, and would decide differently on each of "
            "several data-parallel ranks, or after an overflow in fp16: use one process and bf16."
        )
    # A scheduler made earlier has wrapped the old `step` with its counter; ours keeps count.
    optimizer.__dict__.pop("step", None)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # It cannot divide the gradients of sharded weights while it updates.
    is_split = any(isinstance(p, DTensor) for p in parameters)
    clips = clips_in_step and clip_grad > 0 and obeys_flags(optimizer) and not is_split
    extend(optimizer, "update", lambda cls: _build_update(cls, clock, clip_grad, scaler, clips))
    mark_as_stepped(optimizer)
    return clips


def give_back(reference: ReferenceType[Any], step: Callable[..., Any] | None = None) -> None:
    """Let an optimizer or scheduler step by itself again, with the ``step`` that it had, if any."""
    taken = reference()
    if taken is not None and "update" in list_layers(taken):
        remove(taken, "update")
        if step is not None:
            taken.step = step


def _build_update(
    cls: type[Optimizer],
    clock: UpdateClock,
    clip_grad: float,
    scaler: LossScaler | None,
    clips_in_step: bool,
) -> dict[str, Any]:
    def step(self: Optimizer, closure: Closure | None = None) -> Any:
        if clock.is_bypassed:
            return cls.step(self)
        if closure is not None:
            evaluations = _Evaluations(closure, clock, clip_grad)
            returned: list[Any] = []
            clock.use_gradients(
                lambda: returned.append(cls.step(self, evaluations)), clip_grad, scaler
            )
            return returned[0] if returned else None
        keeper = clock.keeper
        update = keeper.update if keeper else functools.partial(cls.step, self)
        divided: StepDivided | None = None
        if clips_in_step and keeper is None and not has_step_hooks(self):
            divided = functools.partial(step_divided, optimizer=self, step=update)
        clock.use_gradients(update, clip_grad, scaler, divided)
        return None

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        # A keeper clears its own gradients; what the optimizer holds there is not a gradient.
        if clock.is_accumulating or clock.keeper is not None:
            return
        cls.zero_grad(self, set_to_none)
        if clock.is_unused:
            clock.drop_unused()

    mark_as_counted(step)
    step_was_skipped = property(lambda self: clock.was_skipped)
    return {"step": step, "zero_grad": zero_grad, "step_was_skipped": step_was_skipped,
            "__reduce_ex__": _reduce_plain}  # fmt: skip


def _reduce_plain(self: Any, protocol: Any) -> Any:
    """A pickle or copy follows no clock: it is the plain optimizer or scheduler."""
    return _make_new, (get_own_class(self),), self.__getstate__()


def _make_new(cls: Any) -> Any:
    return cls.__new__(cls)


class _Evaluations:
    """A script's closure, maybe evaluated several times; if a gradient waits, for another (SAM)."""

    def __init__(self, closure: Closure, clock: UpdateClock, clip_grad: float) -> None:
        self._closure, self._clock, self._clip_grad = closure, clock, clip_grad
        if clock.keeper is not None or clock.guard is not None:
            raise RapidformerError(
                "optimizer.step(closure) works neither with a DeepSpeed file nor with "
                "--on-bad-loss: the gradient of an update is looked at before its step."
            )
        self._is_known = not clock.is_unused
        self._first = self._evaluate() if self._is_known else None

    def __call__(self) -> Any:
        """What the optimizer calls; the first loss is known by then."""
        if self._is_known:
            self._is_known = False
            return self._first
        loss = self._evaluate()
        self._clock.clip_anew(self._clip_grad)
        return loss

    def _evaluate(self) -> Any:
        with torch.enable_grad():
            loss = self._closure()
        if self._clock.is_accumulating:
            raise RapidformerError(
                "optimizer.step(closure) needs a whole gradient each time: the closure runs one "
                "micro-batch, and an update has more. Make the DataLoader's batch_size that of an "
                "update, or call engine.run_update(forward, update) in the closure."
            )
        return loss


def take_over_scheduler(
    scheduler: LRScheduler, clock: UpdateClock, *, moves: int = 1, stays_at_end: bool = False
) -> LRScheduler:
    """Make ``step`` follow the update, whichever comes first, by this many ``moves`` each time.

    ``stays_at_end``: a schedule with a last step (``OneCycleLR``) does not fail after it.
    """

    def build(cls: type[LRScheduler]) -> dict[str, Any]:
        def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
            def move() -> None:
                for _ in range(moves):
                    if stays_at_end and self.last_epoch >= getattr(self, "total_steps", math.inf):
                        return
                    cls.step(self, *args, **kwargs)

            clock.advance_schedule(move)

        return {"step": step, "__reduce_ex__": _reduce_plain}

    extend(scheduler, "update", build)
    return scheduler
