"""``Trainer``: Hugging Face's trainer over the one loop; its engine is made when first needed."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerControl, TrainerState
from transformers.trainer_utils import BestRun, TrainOutput, align_special_tokens, speed_metrics

from rapidformer.config import Settings
from rapidformer.dialects.calls import check_trainer_call
from rapidformer.dialects.huggingface.accelerator import TrainerAccelerator
from rapidformer.dialects.huggingface.arguments import TrainingArguments
from rapidformer.dialects.huggingface.bridge import TrainerTemplate
from rapidformer.dialects.huggingface.callbacks import (
    Callback,
    CallbackList,
    build_reporting_callbacks,
    build_state,
)
from rapidformer.dialects.huggingface.data_methods import choose_collator, find_label_names
from rapidformer.dialects.huggingface.evaluating import EvaluationMethods
from rapidformer.dialects.huggingface.interface import Inputs, Keys, Metrics
from rapidformer.dialects.huggingface.loss import call_with_count, count_labels, get_loss, takes
from rapidformer.dialects.huggingface.optimizing import OptimizerMethods
from rapidformer.dialects.huggingface.overrides import check_overrides
from rapidformer.dialects.huggingface.records import find_checkpoint_folder
from rapidformer.dialects.huggingface.search import search
from rapidformer.dialects.huggingface.settings import build_settings
from rapidformer.dist.seeding import seed_everything
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ConfigurationError, RapidformerError, raise_problems
from rapidformer.models.adapters import apply_adapters, find_adapter, get_inner
from rapidformer.models.side_effects.pure_calls import trust
from rapidformer.objectives import Context, Objective

_OWN = "rapidformer.dialects.huggingface"
_STEPS = ("compute_loss", "run_training_step", "training_step", "_compute")
_AROUND = ("_prepare_inputs", "compute_loss_context_manager", "autocast_smart_context_manager")
trust(
    f"{_OWN}.accelerator",
    f"{_OWN}.loss",
    *(f"{_OWN}.trainer.Trainer.{name}" for name in _STEPS),
    *(f"{_OWN}.records.RunRecords.{name}" for name in _AROUND),
)


class Trainer(OptimizerMethods, EvaluationMethods):
    """Trains, evaluates and predicts with one model."""

    room = "rapidformer"
    """Where a script imports it from."""
    context: Context | None = None
    """What the objective of the last run was given besides the model."""
    smooths_labels = True
    """Whether label smoothing is about the model's own loss."""

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., Metrics] | None = None,
        callbacks: list[Callback] | None = None,
        optimizers: tuple[Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        *,
        tokenizer: Any = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        check_trainer_call(Trainer.__init__, model, args, others, room=self.room)
        check_overrides(type(self), Trainer)
        if tokenizer is not None and processing_class not in (None, tokenizer):
            raise ConfigurationError("tokenizer= and processing_class= are two names of one thing.")
        if (model is None) == (model_init is None):
            raise ConfigurationError("Trainer needs a model, or a model_init that makes one.")
        if model_init is not None and any(optimizers):
            raise ConfigurationError(
                "optimizers= trains one model, and model_init makes a new one for each run: "
                "override create_optimizer instead."
            )
        if optimizer_cls_and_kwargs is not None and optimizers[0] is not None:
            raise ConfigurationError(
                "optimizers= and optimizer_cls_and_kwargs= both say which optimizer: give one."
            )
        self.args = args if args is not None else TrainingArguments("trainer_output")
        if self.args.eval_strategy != "no" and eval_dataset is None:
            raise ConfigurationError(
                f"eval_strategy={self.args.eval_strategy!r} needs an eval_dataset: pass one, or "
                "set eval_strategy='no'."
            )
        by_batch = self.args.batch_eval_metrics and compute_metrics is not None
        if by_batch and not takes(compute_metrics, "compute_result"):  # type: ignore[arg-type]
            raise ConfigurationError(
                "batch_eval_metrics=True calls compute_metrics(prediction, compute_result=...) for "
                "each batch: give it the argument compute_result, which is True at the last one."
            )
        seed_everything(self.args.seed, deterministic=self.args.full_determinism)
        self.model_init, self._peft_config = model_init, peft_config
        self.model: nn.Module = (
            self.call_model_init() if model is None else self._add_adapters(model)
        )
        self.processing_class = processing_class if processing_class is not None else tokenizer
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.data_collator = data_collator or choose_collator(self.processing_class)
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self._given_optimizers, self._optimizer_class = optimizers, optimizer_cls_and_kwargs
        self._start_records(callbacks or [])

    def _start_records(self, callbacks: list[Callback]) -> None:
        """What a trainer keeps in addition to its arguments, before it has an engine."""
        self.optimizer, self.lr_scheduler = self._given_optimizers
        self.label_names = self.args.label_names or find_label_names(get_inner(self.model))
        self.train_dataloader: Any = None
        self._engine: RapidformerEngine | None = None
        self._built_from: tuple[Any, ...] = (self.model,)
        self._is_training = self._has_trained = False
        self._results: Metrics | None = None
        self._started = time.time()
        self.accelerator = TrainerAccelerator(self)
        self._ignore_keys: Keys = None
        self.control = TrainerControl()
        self.callbacks = CallbackList(
            self, [*build_reporting_callbacks(self.args.report_to), *callbacks]
        )
        self.state: TrainerState = build_state(self)
        self.callbacks.call("on_init_end")

    @property
    def engine(self) -> RapidformerEngine:
        """Made when first needed. Where there is data to train on, it is ready to train."""
        is_first = self._engine is None
        if is_first or (self.model is not self._built_from[0] and not self._is_training):
            self._engine = self._build_engine(self.build_settings())
            if is_first and self._can_train():
                TrainerTemplate(self, self._engine).prepare()
                self._built_from = self._list_parts()
            else:
                self._engine.model.compose_for_evaluation(self.model)
        assert self._engine is not None
        return self._engine

    def _list_parts(self) -> tuple[Any, ...]:
        """What an engine is made from, and a script may replace between two calls."""
        given = self.model, self.train_dataset, self.data_collator
        weights = list(self.model.parameters())
        is_trained = (weight.requires_grad for weight in weights)
        return *given, self.optimizer, self.lr_scheduler, *weights, *is_trained

    def _is_outdated(self, settings: Settings) -> bool:
        """Whether an engine that an evaluation has made would train something else."""
        is_same = list(map(id, self._list_parts())) == list(map(id, self._built_from))
        makes_loader = self.overrides("get_train_dataloader")  # from whatever it likes
        return settings != self._engine_settings or not is_same or makes_loader

    def _can_train(self) -> bool:
        return self.train_dataset is not None or self.overrides("get_train_dataloader")

    def _build_engine(self, settings: Settings) -> RapidformerEngine:
        engine = RapidformerEngine(args=settings)
        self._engine_settings = settings
        self._built_from, self.train_dataloader = (self.model,), None
        return engine

    def build_settings(self) -> Settings:
        """The arguments as the settings of a run."""
        return build_settings(self.args)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """The model that ``model_init`` makes."""
        assert self.model_init is not None
        parameters = inspect.signature(self.model_init).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needs_trial = any(p.kind in positional and p.default is p.empty for p in parameters)
        model = self.model_init(trial) if needs_trial else self.model_init()
        if model is None:
            raise RapidformerError("model_init must return a model, it returned None.")
        return self._add_adapters(model)

    def _add_adapters(self, model: nn.Module) -> nn.Module:
        """At once: an optimizer may be built before there is an engine."""
        if self._peft_config is None or find_adapter(model) is not None:
            return model
        return apply_adapters(model, copy.deepcopy(self._peft_config))

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Keys = None,
    ) -> TrainOutput:
        """Train, also from a checkpoint (True: the newest). ``trial`` is for ``model_init``."""
        settings = self.build_settings()
        folder = find_checkpoint_folder(resume_from_checkpoint, self.args.output_dir)
        if folder is not None:
            settings = settings.replace("resume_from_checkpoint", load=str(folder))
        if self.model_init is not None:
            seed_everything(self.args.seed, deterministic=self.args.full_determinism)
            self.model, self._engine = self.call_model_init(trial), None
            self.optimizer = self.lr_scheduler = None
        config: Any = getattr(self.model, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = self.args.use_cache
        tokens = (PreTrainedTokenizerBase, ProcessorMixin)
        if isinstance(self.processing_class, tokens) and hasattr(self.model, "config"):
            align_special_tokens(self.model, self.processing_class)
        self._ignore_keys = ignore_keys_for_eval
        if self._engine is None or self._has_trained or self._is_outdated(settings):
            self._engine = self._build_engine(settings)
        self.state = build_state(self)
        return self._run(TrainerTemplate(self, self._engine))

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Search with Optuna; each trial trains a new model in ``output_dir/run-<number>``."""
        name = str(getattr(backend, "value", backend or "optuna"))
        problems = []
        if name != "optuna":
            problems.append(f"hyperparameter_search(backend={name!r}) must be 'optuna'.")
        if self.model_init is None:
            problems.append("hyperparameter_search() needs model_init=: a trial needs a new model.")
        if self.eval_dataset is None:
            problems.append("hyperparameter_search() needs an eval_dataset to compare trials on.")
        raise_problems(problems)
        return search(
            self, space=hp_space, compute_objective=compute_objective, trials=n_trials,
            direction=direction, name_trial=hp_name, options=dict(kwargs),
        )  # fmt: skip

    def _run(self, template: TrainerTemplate) -> TrainOutput:
        self._started, self._results = time.time(), None
        self._is_training = self._has_trained = True
        try:
            template.run_training()
        finally:
            self._is_training = False
            self._trained_optimizer = self.optimizer
        if self.args.eval_strategy != "no":
            self.model.eval()  # the evaluation came last, and scripts call the model next
        metrics = self._results or self.log_results()  # nothing was left to train
        if self.args.push_to_hub:
            self.push_to_hub()
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def log_results(self, unlogged: dict[str, float] | None = None) -> Metrics:
        """Log the numbers of the whole run, as the last of its lines.

        ``unlogged`` is the line of the updates after the last one in the history.
        """
        self.state.global_step = steps = self.engine.updates.clock.updates
        samples = self.engine.data.batches.count_samples(steps)
        metrics: Metrics = speed_metrics("train", self._started, samples, self.state.max_steps)
        metrics["total_flos"] = self.state.total_flos
        metrics["train_loss"] = _average_losses([*self.state.log_history, unlogged or {}])
        self.log(metrics)
        self._results = metrics
        return metrics

    def build_objective(self) -> Objective | None:
        """What is learnt, if it is not the loss of ``compute_loss``."""
        return None

    def provide_frozen_models(self) -> Mapping[str, nn.Module]:
        """The models that the objective needs besides this one, on the device."""
        return {}

    def run_training_step(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The loss of a micro-batch, for the loop: whichever way ``training_step`` gives it."""
        inputs = copy.copy(batch) if isinstance(batch, Mapping) else batch
        if self.overrides("floating_point_ops"):
            self.count_work(inputs)
        count = count_labels(model, inputs)
        # Without an override, the loop's own backward pass, which any strategy can schedule.
        step = self.training_step if self.overrides("training_step") else self._compute
        return self.accelerator.take(call_with_count(step, model, inputs, count=count))

    def _compute(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            return call_with_count(self.compute_loss, model, inputs, count=num_items_in_batch)

    def training_step(
        self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward pass of a micro-batch; returns its loss.

        An override may call this, or ``self.accelerator.backward(loss)``, any number of times and
        read or change gradients in between; or it returns the loss with its graph.
        """
        if not self._is_training:  # called by hand
            _ = self.engine  # which puts the model on its device
            model.train()
        loss: torch.Tensor = self._compute(model, inputs, num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The mean loss over the labels of a micro-batch.

        ``num_items_in_batch`` counts the labels of this micro-batch: the loop weighs micro-batches
        by theirs, so a sum divided by it becomes the exact mean over the global batch.
        """
        labels = None
        if self.compute_loss_func is not None and "labels" in inputs:
            labels = inputs.pop("labels")
        outputs = model(**inputs)
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        else:
            loss = get_loss(outputs, inputs)
        return (loss, outputs) if return_outputs else loss

    def overrides(self, name: str) -> bool:
        """Whether a subclass has its own method of this name."""
        return getattr(type(self), name) is not getattr(Trainer, name)


def _average_losses(history: list[dict[str, float]]) -> float:
    """The mean over all updates; each line is a mean over those since the line before."""
    total, before = 0.0, 0.0
    for line in history:
        if "loss" in line:
            total += line["loss"] * (line["step"] - before)
            before = line["step"]
    return total / before if before else 0.0
