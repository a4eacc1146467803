"""Let a run go as far as its first update, without values, and keep what would run there.

The run is the user's own, in one process on the CPU with every switch off: its data, its model, its
forward step. Models are built on the meta device where that is possible, so size does not matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from rapidformer.config import Settings
from rapidformer.config.switches import SWITCHES
from rapidformer.data.update import MicroBatch, Update
from rapidformer.errors import RapidformerError
from rapidformer.models.deferred import building_hollow
from rapidformer.models.recording import list_tensors
from rapidformer.optim.observer import RunObserver, observe_runs

Result = TypeVar("Result")
SOURCE = "rapidformer plan"
_ROWS = 256
"""Rows of the training data whose lengths are looked at."""
_KEPT = frozenset({"attention", "no cache in training", "host masks"})
"""Switches without which the model would compute something else."""


class _CapturedError(BaseException):
    """The first update is reached. Not an ``Exception``, so a loop's ``except`` lets it pass."""


@dataclass
class Captured:
    """A run at its first update."""

    model: nn.Module
    forward: Callable[[Any], Any]
    """From a batch to its loss."""
    batch: Any
    lengths: list[int] = field(default_factory=list)
    """Of rows of the training data, as far as they show."""
    micro_batch_size: int = 1
    """Samples of the batch: a pair of texts is one, and two rows."""
    beside: int = 0
    """Bytes of frozen models: a reference, a teacher."""
    samples: int = 0
    """Of the training data; 0 if unknown."""
    optimizer: str = ""
    """The class of the script's own optimizer, if it has one."""


def capture(
    settings: Settings, train: Callable[[], None], use: Callable[[Captured], Result]
) -> Result:
    """Run ``train`` until its first update, and ``use`` it there, while its engine is open.

    The settings are those of the planned run.
    """
    observer = _Observer(settings, use)
    with observe_runs(observer), building_hollow(), contextlib.suppress(_CapturedError):
        train()
    if not observer.results:
        raise RapidformerError(
            "the run ended before its first optimizer step: there is nothing to plan. Does it "
            "train with an engine (engine.backward and optimizer.step), on enough data for a step?"
        )
    return observer.results[0]


class _Observer(RunObserver, Generic[Result]):
    def __init__(self, settings: Settings, use: Callable[[Captured], Result]) -> None:
        self._settings, self._use = settings, use
        self._engine: Any = None
        self._hook: Any = None
        self._collate: Any = None
        self._rows: list[Any] = []
        self._samples = 0
        self.results: list[Result] = []

    def change_settings(self, args: Settings) -> Settings:
        planned = self._settings
        args = args.keep_nothing(SOURCE)
        for switch in SWITCHES:
            if switch.name not in _KEPT and (not switch.on_values or switch.is_on(args)):
                args = args.replace(SOURCE, **switch.get_off_values())
        if planned.user_script is None or has_own_batch_size(planned):
            args = args.replace(
                SOURCE,
                micro_batch_size=planned.micro_batch_size,
                global_batch_size=planned.micro_batch_size,
                gradient_accumulation_steps=None,
            )
        words = [row.word for row in SWITCHES if row.has_word and row.name not in _KEPT]
        return args.replace(
            SOURCE,
            without=words,
            nproc_per_node=None, nnodes=None, hostfile=None, data_parallel=None, device="cpu",
            packing=False, optimizer="adafactor", optimizer_state_dtype="fp32",
            rampup_batch_size=None, tokens_per_micro_batch=None, num_workers=0,
            eval_iters=0, tensorboard_dir=None, report_to=None, progress=False, resume=None,
            log_level="error", plan=False,
        )  # fmt: skip

    def see_training_data(self, dataset: Any, collate: Any) -> None:
        self._collate = collate
        if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
            self._samples = len(dataset)
            self._rows = [dataset[index] for index in range(min(_ROWS, self._samples))]

    def after_compose(self, engine: Any) -> None:
        self._engine = engine
        if engine.updates.is_own_loop:
            module = engine.model.module
            self._hook = module.register_forward_pre_hook(self._see_call, with_kwargs=True)

    def before_update(self, forward: Any, update: Update) -> None:
        micro_batch = update[0]._replace(batch=self._choose_batch(update[0].batch))
        update = Update((micro_batch,), update.positions)
        prepare = getattr(forward, "prepare", None)
        weights = self._engine.updates.weights

        def run(batch: Any) -> Tensor:
            given: MicroBatch = micro_batch._replace(batch=batch)
            if prepare is not None:
                topology, device = self._engine.runtime.topology, self._engine.device
                given = prepare(Update((given,), update.positions), topology, device)[0]
            return weights.run_forward(forward, given).loss

        context = getattr(forward, "context", None)
        self._finish(run, micro_batch.batch, getattr(context, "frozen", {}))

    def _see_call(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return

        def run(batch: Any) -> Any:
            output = model(*batch[0], **batch[1])
            loss = output.get("loss") if isinstance(output, Mapping) else None
            floats = (t for t in list_tensors(output) if t.is_floating_point())
            means: Any = (t.float().mean() for t in floats)
            total: Tensor = loss if loss is not None else sum(means)
            return total

        self._finish(run, (args, kwargs))

    def _finish(
        self, forward: Callable[[Any], Any], batch: Any, frozen: Mapping[str, Any] | None = None
    ) -> None:
        updates, model = self._engine.updates, self._engine.model.module
        beside = [module for module in (frozen or {}).values() if isinstance(module, nn.Module)]
        apart = {id(p): p for module in beside for p in module.parameters()}
        apart = {key: p for key, p in apart.items() if key not in set(map(id, model.parameters()))}
        if self._hook is not None:
            self._hook.remove()
        own = type(updates.optimizer).__name__ if updates.has_own_optimizer else ""
        captured = Captured(
            model=model, forward=forward, batch=batch,
            beside=sum(p.numel() * p.element_size() for p in apart.values()),
            lengths=[length for row in self._rows if (length := get_length(row))],
            samples=self._samples, optimizer=own,
            micro_batch_size=getattr(self._engine.data.train_loader, "batch_size", None) or 1,
        )  # fmt: skip
        self.results.append(self._use(captured))
        raise _CapturedError

    def _choose_batch(self, batch: Any) -> Any:
        """The longest rows, which decide how much memory a run needs."""
        rows, count = self._rows, self._settings.micro_batch_size or 1
        lengths = [get_length(row) for row in rows]
        if len(rows) < count or len(set(lengths)) < 2 or 0 in lengths:
            return batch
        longest = sorted(rows, key=get_length, reverse=True)[:count]
        try:
            return self._collate(longest)
        except Exception:  # some need to know where a row stands: the first batch will do
            return batch


def has_own_batch_size(settings: Settings) -> bool:
    """Whether the settings say how large a micro-batch is; otherwise a script does."""
    return settings.is_given("micro_batch_size") or settings.is_given("global_batch_size")


def get_length(row: Any) -> int:
    """Tokens of a row of the data; 0 if it does not show."""
    ids = row.get("input_ids") if isinstance(row, Mapping) else None
    return len(ids) if ids is not None and hasattr(ids, "__len__") else 0
