"""What PreTrainer and Finetuner share: data, loaders, model, compose, resume, loop."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from rapidformer.accel.dropout_seeds import apply_no_dropout
from rapidformer.checkpoint.finding import find_checkpoint
from rapidformer.checkpoint.writing import run_on_first
from rapidformer.config import Settings
from rapidformer.context import replace_args
from rapidformer.data.fetching import Collate
from rapidformer.data.label_view import Prepared, Tokenized
from rapidformer.data.loader import DistributedLoader
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import CheckpointError, ConfigurationError, ModelError, RapidformerError
from rapidformer.hub import quiet_transformers
from rapidformer.log import get_logger
from rapidformer.models.location import check_has_tokenizer, is_model_folder
from rapidformer.objectives import BoundObjective, Objective
from rapidformer.objectives.loss_function import LossFunction
from rapidformer.objectives.objective import AskedModel
from rapidformer.training.best_model import is_greater_better
from rapidformer.training.callbacks import Callback, Control, RunningLoop
from rapidformer.training.evaluation import Evaluation, Metrics, Progress
from rapidformer.training.frozen_models import FrozenModels
from rapidformer.training.loop import TrainingLoop
from rapidformer.training.regularization import regularize
from rapidformer.training.report import Reporter
from rapidformer.training.run_folder import (
    LAST,
    begin_run,
    choose_folder,
    drop_replaced,
    dropped_if_unused,
    recover,
    restore_replaced,
)
from rapidformer.training.run_record import RunRecord
from rapidformer.training.summary import describe_finished, describe_model, describe_run
from rapidformer.training.timetable import OPEN_END
from rapidformer.training.trackers import Tracker


class Template(ABC):
    """The common part of the templates; users subclass PreTrainer or Finetuner."""

    processor: Any = None
    """Tokenizer or image processor to save with the model, if the subclass has one."""
    best_metric: str | None = None
    greater_is_better: bool = True
    saves_each_epoch = False
    """Whether a checkpoint is kept after each epoch if no interval is given."""
    callbacks: Sequence[Callback] = ()
    """Called at the loop's hook points, after our own callbacks."""
    trackers: Sequence[Tracker] = ()
    """Get the numbers of the run on rank 0, in a thread of their own; beside ``--report-to``."""
    has_shifted_labels: bool | None = None
    """Whether the model compares each position with the next label; None: decided by its class."""
    smooths_labels = True
    """Whether --label-smoothing is about the model's own loss, not about the objective's."""
    uses_dropout: bool = True
    """False: the model is trained without dropout, as preferences are: they compare likelihoods."""

    def __init__(self, engine: RapidformerEngine) -> None:
        self.engine = engine
        self.details: dict[str, Any] = {}
        """What an evaluation has found beside its metrics, for the run's page."""

    @property
    def args(self) -> Settings:
        return self.engine.args

    def model_optimizer_lr_scheduler_provider(self) -> tuple[Any, Any, Any]:
        """Hook: ``(model, optimizer or None, lr_scheduler or None)``."""
        raise _missing_hook(self, "model_optimizer_lr_scheduler_provider")

    def run_forward_step(self, batch_or_iterator: Any, model: Any) -> Any:
        """Hook: run the model and return the loss."""
        raise _missing_hook(self, "run_forward_step")

    def build_data_loader(
        self, dataset: Any, collate_fn: Collate | None = None, *, shuffle: bool | None = None
    ) -> DistributedLoader:
        """A loader for this rank's part of the data, with batches on the device."""
        return self.engine.data.build_loader(dataset, collate_fn, shuffle=shuffle)

    def gather(self, tensor: Any, pad_value: float | None = None) -> Any:
        """The rows of all ranks, each example once."""
        return self.engine.gather(tensor, pad_value)

    @property
    @abstractmethod
    def is_shuffled(self) -> bool:
        """Whether the training data is reshuffled each epoch."""

    @abstractmethod
    def get_datasets(self) -> tuple[Any, Any, Any, Any]:
        """Training, validation and test data and the collate function, from the hook."""

    @abstractmethod
    def build_eval_loader(self, dataset: Any, collate: Any) -> DistributedLoader | None:
        """A loader over the validation data; None if there is none."""

    @abstractmethod
    def make_evaluation(self, model: Any, loader: DistributedLoader | None) -> Evaluation | None:
        """How and when the model is evaluated; None if it is not."""

    def train(self) -> dict[str, float]:
        """Train to the end; returns the numbers of the last evaluation."""
        with dropped_if_unused(self._choose_folder()), self.holding_folder():
            return self._train()

    @contextmanager
    def holding_folder(self) -> Iterator[None]:
        """Hold the run's folder; an earlier run in it is replaced only if this one succeeds."""
        if self.args.save is None:
            yield
            return
        folder = Path(self.args.save)
        self.engine.checkpoints.hold_folder(folder)
        try:
            run_on_first(lambda: recover(folder), folder)
            yield
            if self.engine.is_main:
                drop_replaced(folder)
        except BaseException:
            # Another run may have taken the folder over: then nothing in it is ours to restore.
            if self.engine.is_main and self.engine.checkpoints.holds_folder:
                restore_replaced(folder)
            raise
        finally:
            self.engine.checkpoints.release_folder()

    def _train(self) -> dict[str, float]:
        resume = self.find_resume_folder()
        train_data, valid_data, test_data, collate = self.frozen_models.number_rows(
            *self.get_datasets()
        )
        loader = self.engine.data.build_loader(
            train_data, collate, shuffle=self.is_shuffled, is_training=True
        )
        eval_loader = self.build_eval_loader(valid_data, collate)
        model = self.compose()
        if self.processor is None and self.engine.is_main:  # only rank 0 exports
            self.processor = find_processor(self, collate, model)
        evaluation = self.make_evaluation(model, eval_loader)
        test = self.make_test(model, test_data, collate)
        return self.run_loop(
            loader, model, evaluation=evaluation, eval_data=eval_loader, test=test, resume=resume
        ).evaluations

    def make_test(self, model: Any, dataset: Any, collate: Any) -> Callable[[], Metrics] | None:
        """How the finished model is evaluated on test data; None if it is not."""
        evaluation = self.make_evaluation(model, self.build_eval_loader(dataset, collate))
        return None if evaluation is None else evaluation.run

    def _choose_folder(self) -> str | None:
        """Give the run a folder, unless it keeps none; returned if this rank may remove it."""
        args = self.args
        if args.keeps_nothing:
            return None
        if args.save is not None:
            return args.save if self.engine.is_main and not Path(args.save).exists() else None

        def choose() -> dict[str, Any]:
            chosen = choose_folder(args)
            return {name: getattr(chosen, name) for name in ("save", "load", "overwrite")}

        changed = run_on_first(choose, Path())
        self.engine.args = args.replace("derived: every run has a folder", **changed)
        replace_args(self.engine.args)
        return self.args.save if self.engine.is_main else None

    def find_resume_folder(self) -> Path | None:
        """The checkpoint that ``--load`` names, if any; also checks ``--save``."""
        args, resume = self.args, None
        if args.load is not None:
            source = Path(args.load).expanduser()
            resume = source if source.is_dir() and find_checkpoint(source) else None
            if source.is_file():
                raise CheckpointError(
                    f"--load {args.load} is a file: give a run, one of its checkpoints, or a model "
                    "folder. Weights in a single file belong next to a config.json, or are loaded "
                    "by your script itself."
                )
            has_model = is_model_folder(source)
            if resume is None and args.is_given("load") and source.is_dir() and not has_model:
                raise CheckpointError(
                    f"--load {args.load} holds neither a checkpoint (iter_… folders) nor a model "
                    "(config.json) or an adapter (adapter_config.json)."
                )
        if args.save is not None:
            begin = functools.partial(
                begin_run, Path(args.save), overwrite=args.overwrite,
                source=None if args.load is None else Path(args.load).expanduser(),
                continues=resume is not None and not args.finetune,
            )  # fmt: skip
            # Rank 0 looks; what it finds wrong stops all ranks.
            run_on_first(begin, Path(args.save))
        return resume

    def compose(self) -> Any:
        """Get model, optimizer and schedule from the hook and apply all switches."""
        hook: Any = self.model_optimizer_lr_scheduler_provider
        # Elsewhere, the caller says which end of a pipeline to build; here all of it is cut later.
        provided = hook() if accepts_arguments(hook, 0) else hook(True, True)
        if not isinstance(provided, tuple) or len(provided) != 3:
            raise RapidformerError(
                "model_optimizer_lr_scheduler_provider must return three things: model, "
                "optimizer (or None), lr_scheduler (or None)."
            )
        model, optimizer, scheduler = provided
        if not self.uses_dropout:
            apply_no_dropout(model)
        self.frozen_models.before_compose()
        is_function = callable(scheduler) and not hasattr(scheduler, "state_dict")
        self.engine.updates.is_own_loop = False
        composed, *_ = self.engine.compose(
            model, optimizer, scheduler if is_function else None,
            lr_scheduler=None if is_function else scheduler,
        )  # fmt: skip
        if not self.uses_dropout:
            apply_no_dropout(composed)  # that of adapters, which a plain model has got by now
        return composed

    def build_objective(self) -> Objective:
        """What is learnt: the loss that ``run_forward_step`` returns, unless overridden."""
        return LossFunction(
            lambda model, batch: self.run_forward_step(self.wrap_batch(batch), model),
            self.list_steps(),
        )

    def provide_frozen_models(self) -> Mapping[str, nn.Module | AskedModel]:
        """Hook: the models that ``Objective.frozen`` names, on the device.

        The run itself makes the ``reference``, unless this returns one.
        ``engine.model.compose_beside(model).module`` is a model under the run's layout; a plain one
        is whole on each rank.
        """
        return {}

    @functools.cached_property
    def frozen_models(self) -> FrozenModels:
        """Those that the objective names, made once."""
        return FrozenModels(self.engine, self.build_objective, self.provide_frozen_models)

    def make_forward(self, model: Any) -> BoundObjective:
        """The objective with this model: a function of the batch only."""
        if self.has_shifted_labels is not None:
            is_shifted = self.has_shifted_labels and not self.engine.model.has_learned_tokens
            self.engine.updates.weights.shifts_labels = is_shifted
        return BoundObjective(
            self.build_objective(), model, self.frozen_models.get(), self.engine.model.evaluating
        )

    def list_steps(self) -> list[Callable[..., Any]]:
        """The code that runs in a forward step and may be the user's."""
        return [self.run_forward_step]

    def wrap_batch(self, batch: Any) -> Any:
        """The argument of the forward step: the batch itself, unless a template says otherwise."""
        return batch

    def run_loop(
        self,
        loader: DistributedLoader,
        model: Any,
        *,
        evaluation: Evaluation | None,
        eval_data: Any,
        resume: Path | None,
        test: Callable[[], Metrics] | None = None,
    ) -> Progress:
        """Resume, print the summary, and run the training loop."""
        train_iters = self.engine.data.get_train_iters()
        if train_iters is None and loader.is_stream and self.args.epochs:
            train_iters = OPEN_END
        if train_iters is None:
            raise ConfigurationError("give the length of training: --epochs or --train-iters.")
        if not self.args.finetune:
            self.frozen_models.take_reference(resume)
        extra = self.engine.load_checkpoint(resume) if resume is not None else {}
        if self.args.finetune:  # a new run, which starts from the weights of the checkpoint
            self.frozen_models.take_reference(None)
        # Another batch size changes it.
        train_iters = self.engine.data.get_train_iters() or train_iters
        checkpoints, is_main = self.engine.checkpoints, self.engine.is_main
        if self.args.save is not None:
            checkpoints.abandon_later(Path(self.args.save), [LAST])
        reporter = Reporter(
            self.args, total_steps=train_iters, resume_step=self.engine.updates.clock.updates,
            speaks=is_main, trackers=self.trackers, facts=describe_model(self.engine),
            check_folder=checkpoints.check_folder,
        )  # fmt: skip
        summary = describe_run(self.engine, train_iters, loader, eval_data) if is_main else []
        for line in summary:
            get_logger().info(line)
        record = RunRecord(
            self.args, is_main=is_main, summary=summary, prepared=self.get_prepared(),
            details=self.details, check_folder=checkpoints.check_folder,
        )  # fmt: skip
        forward = self.make_forward(model)
        if loader.sets is not None and len(loader.sets.names) > 1:
            forward.set_losses = tuple(f"{name}_loss" for name in loader.sets.names)
        loop = TrainingLoop(
            self.engine, loader, forward,
            train_iters=train_iters, reporter=reporter, record=record, evaluation=evaluation,
            test=test, processor=self.processor, saves_each_epoch=self.saves_each_epoch,
            callbacks=[_FirstCheckpoint(), *self.callbacks],
        )  # fmt: skip
        if resume is not None and not self.args.finetune:
            loop.restore(extra)
            if loop.course.is_finished:
                for line in describe_finished(self.args, step=loop.step, total=train_iters):
                    reporter.say(line)
                reporter.close()
                return loop.progress
        with regularize(model, self.args, smooths_labels=self.smooths_labels):
            return loop.run()

    def get_prepared(self) -> Prepared | None:
        """What is known about a batch, to show it on the run's page; None if nothing is."""
        is_text = hasattr(self.processor, "convert_ids_to_tokens")
        return Tokenized(self.processor) if is_text else None

    def plan_evaluation(
        self, run: Callable[[], Metrics], interval: int | None = None
    ) -> Evaluation:
        """An evaluation by the metric that decides the best model."""
        name, greater = self.best_metric, self.greater_is_better
        if self.args.metric_for_best_model is not None:
            name = self.args.metric_for_best_model.removeprefix("eval_")
            greater = is_greater_better(name)
        return Evaluation(run=run, interval=interval, best_metric=name, greater_is_better=greater)


class _FirstCheckpoint(Callback):
    """Deletes the run that this one replaces, once this one has a checkpoint."""

    def on_save(self, loop: RunningLoop, control: Control, folder: Path) -> None:
        if loop.engine.is_main:
            drop_replaced(folder.parent)


def find_processor(template: Any, collate: Any, model: Any) -> Any | None:
    """The tokenizer or image processor of a script's model, wherever it may be; or None."""
    for owner in (template, collate, getattr(collate, "__self__", None)):
        for name in ("processor", "processing_class", "tokenizer", "image_processor"):
            processor = getattr(owner, name, None)
            if hasattr(processor, "save_pretrained"):
                return processor
    location = str(getattr(model, "name_or_path", "") or "")
    if not location:
        return None
    from transformers import AutoTokenizer

    try:
        if Path(location).is_dir():
            check_has_tokenizer(location)
        with quiet_transformers(location):
            return AutoTokenizer.from_pretrained(
                location, local_files_only=True, trust_remote_code=False
            )
    except (ModelError, OSError, ValueError, KeyError, ImportError):
        return None  # the model has none and needs none


def unpack_datasets(provided: Any) -> tuple[Any, Any, Any, Any]:
    """Training, validation and test data and the collate function, as a hook returned them."""
    if not isinstance(provided, tuple) or len(provided) not in (3, 4):
        raise RapidformerError(
            "train_valid_test_datasets_provider must return training, validation and test data "
            "(each may be None), and a collate function if wanted."
        )
    train_data, valid_data, test_data, collate = (*provided, None)[:4]
    if train_data is None:
        raise RapidformerError("train_valid_test_datasets_provider returned no training data.")
    return train_data, valid_data, test_data, collate


def accepts_arguments(function: Callable[..., Any], count: int) -> bool:
    """Whether a hook takes this many positional arguments: users' signatures differ."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    return True


def _missing_hook(template: Template, name: str) -> RapidformerError:
    return RapidformerError(f"{type(template).__name__} must define {name}().")
