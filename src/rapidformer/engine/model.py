"""The model of a run: its plan, adapters and switches, all taken off again on closing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rapidformer.accel.double_backward import RowGradients
from rapidformer.accel.parallelize import Parallelized, parallelize
from rapidformer.accel.precision.precision import Precision
from rapidformer.accel.sharding.zero import gather_weight
from rapidformer.config import Settings
from rapidformer.dist.heartbeat import in_phase
from rapidformer.engine.current_batch import CurrentBatch
from rapidformer.engine.runtime import Runtime
from rapidformer.errors import ModelError, RapidformerError
from rapidformer.log import get_logger
from rapidformer.models import adapters
from rapidformer.models.adapter_config import build_config
from rapidformer.models.evaluation_mode import evaluation_mode
from rapidformer.models.own_loss import shifts_labels
from rapidformer.models.plan import GivenPlan
from rapidformer.models.work import ModelWork, count_work
from rapidformer.optim.observer import get_observer

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class RunModel:
    """A model, once composed, with what was applied to it."""

    def __init__(self, args: Settings, runtime: Runtime, current: CurrentBatch) -> None:
        self.args = args
        self.module: nn.Module | None = None
        """The user's own module, once composed; without an adapter's shell around it."""
        self.parameters: list[nn.Parameter] = []
        """As they are between updates: sharded ones are shards."""
        self.adapter: adapters.Adapter | None = None
        """What is trained instead of the model's own weights, if anything is."""
        self.work: ModelWork | None = None
        """The arithmetic that training the model takes, once composed."""
        self.shifts_labels = False
        """Whether the model compares each position with the next label."""
        self.skips_cache = True
        """Whether a model keeps no key/value cache in training."""
        self.keeps_start = False
        """Whether ``compose`` keeps what a reference needs of the model: set it before."""
        self.start: RunModel | None = None
        """A frozen copy of the model as composed, unless its adapters are all that is trained."""
        self._beside: list[RunModel] = []
        self._runtime, self._current = runtime, current
        self._parallelized: Parallelized | None = None
        self._row_gradients = RowGradients()

    @property
    def parallelized(self) -> Parallelized:
        """The model with its plan and switches, once composed."""
        if self._parallelized is None:
            raise RapidformerError("call engine.compose(model=...) first.")
        self._parallelized.applied.check_open()
        return self._parallelized

    @property
    def has_learned_tokens(self) -> bool:
        """Whether every row begins with tokens of an adapter (prompt tuning)."""
        return self.adapter is not None and self.adapter.prepends_tokens

    def compose(
        self,
        model: nn.Module,
        plan: GivenPlan | None = None,
        *,
        has_optimizer: bool = False,
        is_own_loop: bool = False,
    ) -> dict[int, str]:
        """Apply all rows for training; returns the names of the parameters as they were before."""
        if self.module is not None:
            raise RapidformerError("this engine has already composed a model: create a new one.")
        model = self._add_adapters(model, has_optimizer=has_optimizer)
        if self.adapter is not None and is_own_loop and self._runtime.is_main:
            get_logger().info("adapter   %s", adapters.describe_adapter(self.adapter, model))
        get_observer().before_compose(model)
        self.work = count_work(model)
        names = {id(p): name for name, p in model.named_parameters()}
        start = copy.deepcopy(model) if self.keeps_start and self.adapter is None else None
        self._switch_on(model, plan, for_training=True)
        if start is not None:
            precision = self.args.reference_precision
            self.start = self.compose_beside(start, plan=plan, precision=precision)
        if is_own_loop:
            self._watch_calls(model)
        # Listed once: walking a model's modules takes longer than many of its kernels.
        self.parameters = list(model.parameters())
        return names

    def compose_for_evaluation(
        self, model: nn.Module, *, plan: GivenPlan | None = None
    ) -> nn.Module:
        """Apply what a model needs without training: no optimizer, no schedule."""
        inner = adapters.get_inner(model)
        self.adapter = adapters.find_adapter(inner)
        self._switch_on(inner, plan, for_training=False)
        self._watch_calls(inner)
        return model.eval()

    def compose_beside(
        self,
        model: nn.Module,
        *,
        plan: GivenPlan | None = None,
        precision: str | None = None,
        layout: Mapping[str, Any] | None = None,
    ) -> RunModel:
        """A second model, frozen, under the layout of this run; it is closed with the first one.

        With a ``precision``, its weights are kept in it, and it computes in it. ``layout`` has the
        settings that differ from those of the run: it may be sharded while the first one is whole.
        """
        args, runtime = self.args, self._runtime
        if precision is not None:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(_DTYPES[precision])
            runtime = replace(runtime, precision=Precision(dtype=None, reason=precision))
        if layout:
            args = args.replace("the layout of a second model", **layout)
        beside = RunModel(args, runtime, self._current)
        beside.compose_for_evaluation(model.requires_grad_(False), plan=plan)
        self._beside.append(beside)
        return beside

    def _watch_calls(self, model: nn.Module) -> None:
        """Let ``backward`` and ``gather`` know which batch went through the model."""
        see_call = self._current.see_call
        # Kept out of a model compiled as a whole, like torch's own hooks.
        hook = torch.compiler.disable(lambda module, *inputs: see_call(inputs))
        handle = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        self.parallelized.applied.keep_hook(handle)

    def _switch_on(self, model: nn.Module, plan: GivenPlan | None, *, for_training: bool) -> None:
        self.shifts_labels = shifts_labels(model) and not self.has_learned_tokens
        kept = [] if self.skips_cache else ["no-cache-in-training"]
        without = [*(self.args.without or ()), *kept]
        self._parallelized = parallelize(
            model, self.args.replace("the script", without=without),
            device=self._runtime.device, topology=self._runtime.topology,
            precision=self._runtime.precision, given_plan=plan, for_training=for_training,
            is_filler=self._current.is_filler, is_by_row=self._row_gradients.is_on,
        )  # fmt: skip
        self.module = model
        self._current.has_model = True

    def _add_adapters(self, model: nn.Module, *, has_optimizer: bool) -> nn.Module:
        """The model that holds the weights, with the adapters that the settings ask for."""
        inner = adapters.get_inner(model)
        is_new = adapters.find_adapter(inner) is None and build_config(self.args) is not None
        if is_new and has_optimizer:  # before the model is changed: compose may be called again
            raise RapidformerError(
                "the optimizer given to compose() was built before the adapters, which it would "
                "not train. Build the model with its adapters first, then the optimizer:\n"
                "    model = engine.build_model(lambda: AutoModel.from_pretrained(...))\n"
                "or let compose() build the optimizer from the flags."
            )
        adapted = adapters.add_adapters(inner, self.args)
        resized = adapters.forget_resized_base(adapted)
        if resized is not None and self._runtime.is_main:
            get_logger().warning(resized)
        self.adapter = adapters.find_adapter(adapted)
        if self.adapter is not None and not any(p.requires_grad for p in adapted.parameters()):
            raise ModelError(adapters.describe_untrainable(self.adapter))
        return adapted

    def gather_weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter that ZeRO or tensor parallelism has split, for use in a loss.

        Every rank must call it, for the same parameters in the same order. The gradient is that of
        one process. A parameter that is whole is returned as it is.
        """
        return gather_weight(self.parallelized.synchronizer, parameter)

    @contextmanager
    def gradients_by_row(self) -> Iterator[None]:
        """Allow a gradient penalty on several data-parallel ranks.

        For ``torch.autograd.grad(outputs.sum(), inputs, create_graph=True)`` and the like, where
        each row's gradient depends on that row alone.
        """
        before, self._row_gradients.is_taken = self._row_gradients.is_taken, True
        try:
            yield
        finally:
            self._row_gradients.is_taken = before

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """No gradients and no dropout inside; afterwards, training mode is restored."""
        mode = evaluation_mode(self.parallelized.model)
        with mode, torch.no_grad(), in_phase("evaluate"), self.parallelized.keep_gathered():
            yield

    def close(self, *, gives_back: bool) -> None:
        """Let go of the model; with ``gives_back``, it is the plain model again."""
        for second in self._beside:
            second.close(gives_back=False)
        parallelized, self._parallelized, self.module = self._parallelized, None, None
        self.parameters, self.adapter, self.start, self._beside = [], None, None, []
        if parallelized is None:
            return
        if parallelized.deepspeed is not None:
            parallelized.deepspeed.close()
        elif gives_back:
            parallelized.applied.undo()
            return
        parallelized.applied.leave_contexts()
