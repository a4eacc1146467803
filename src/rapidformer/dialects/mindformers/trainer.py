"""MindFormers' trainer: four verbs over the black-box tasks, each with an engine of its own.

A model instance with data sets of its own runs as Hugging Face's trainer does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from rapidformer.checkpoint.finding import PREVIOUS
from rapidformer.config import Settings
from rapidformer.dialects.calls import MINDFORMERS, in_words_of
from rapidformer.dialects.huggingface.names import HUGGING_FACE
from rapidformer.dialects.huggingface.trainer import Trainer
from rapidformer.dialects.huggingface.weights import load_weights
from rapidformer.dialects.mindformers.calls import (
    GivenTask,
    check_arguments,
    check_options,
    is_path,
    measure_own,
    name_by_type,
    read_generation,
    read_prompts,
    rename_answers,
)
from rapidformer.dialects.mindformers.context import adopt_rank_variables
from rapidformer.dialects.mindformers.file import load_mindformers_file
from rapidformer.dialects.mindformers.names import (
    MODELS,
    PARALLEL_CONFIG,
    PET_METHODS,
    RECOMPUTE_CONFIG,
    TASKS,
    TRAINER,
    TRAINING_ARGUMENTS,
)
from rapidformer.dialects.mindformers.settings import (
    SOURCE,
    MindFormersArguments,
    build_parallel_settings,
    check_task,
)
from rapidformer.dist.processes import get_world_size_from_environment
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.log import configure_logging, get_logger, say_once, warn_once
from rapidformer.models.adapter_config import build_config
from rapidformer.models.adapter_folder import is_adapter_folder
from rapidformer.models.adapters import find_adapter
from rapidformer.models.location import is_model_folder
from rapidformer.tasks.evaluation.evaluating import evaluate_task
from rapidformer.tasks.evaluation.predicting import predict_task
from rapidformer.training.run_folder import BEST, LAST, set_aside

_NEEDS_INSTANCE = ("optimizers", "data_collator")
_SPEAKING = in_words_of(TRAINING_ARGUMENTS, TRAINER, HUGGING_FACE)
Checkpoint = str | bool | None


class MindFormersTrainer(Trainer):
    """Trains, evaluates and predicts by a task's name."""

    room = MINDFORMERS

    @_SPEAKING
    def __init__(
        self,
        args: Any = None,
        task: str = "general",
        model: Any = None,
        model_name: str | None = None,
        *others: Any,
        **named: Any,
    ) -> None:
        adopt_rank_variables(os.environ)
        named = name_by_type(others) | named
        self._checkpoint: str | None = None
        if isinstance(args, (str, Path)):
            args, from_file = self._read_file(args)
            task = from_file.pop("task", task) if task == "general" else task
            model_name = model_name or from_file.pop("model_name", None)
            from_file.pop("task", None)
            named = from_file | named
        check_arguments(args, task, named)
        self.args = args if args is not None else MindFormersArguments()
        self.task_name = task
        self._adapters = PET_METHODS.get(str(named.get("pet_method") or ""), {})
        self._parallel: dict[str, Any] = {}
        self._recompute: dict[str, Any] = {}
        self._trained: Path | None = None
        self._named = named
        data = (named.get("train_dataset"), named.get("eval_dataset"))
        self._is_instance = isinstance(model, nn.Module) and not any(map(is_path, data))
        if self._is_instance:
            self._set_up_instance(model, named)
            return
        idle = [name for name in _NEEDS_INSTANCE if named.get(name)]
        if idle:
            raise ConfigurationError(
                f"Trainer({', '.join(idle)}) need a model instance and data sets: with a model's "
                "name, the task brings them."
            )
        self._location = self._choose_location(model if model is not None else model_name)
        self.train_dataset, self.eval_dataset = data
        self.compute_metrics = named.get("compute_metrics")

    def _read_file(self, path: str | Path) -> tuple[MindFormersArguments, dict[str, Any]]:
        """The arguments in MindFormers' YAML file, and what it says about the trainer."""
        file = load_mindformers_file(path)
        if file.unused:
            configure_logging()
            say_once(f"{path}: not used here: {', '.join(file.unused)}.")
        self._checkpoint = file.checkpoint
        return MindFormersArguments(**file.arguments), file.trainer

    @property
    def has_hooks(self) -> bool:
        """Whether callbacks or metrics of the user's take part in a task."""
        return bool(self._named.get("callbacks") or self.compute_metrics)

    def adopt_task(self, engine: RapidformerEngine, model: nn.Module, processor: Any) -> None:
        """Show the callbacks and metrics what a task trains."""
        self.model, self.processing_class = model, processor
        self.compute_loss_func = self.preprocess_logits_for_metrics = self.model_init = None
        self._given_optimizers, self._optimizer_class = (None, None), None
        self._start_records(_list(self._named.get("callbacks")))
        self._engine = engine

    def _set_up_instance(self, model: nn.Module, named: dict[str, Any]) -> None:
        self._adds_adapter = bool(self._adapters) and find_adapter(model) is None
        optimizers = named.get("optimizers")
        pair = optimizers if isinstance(optimizers, tuple) else (optimizers, None)
        same = ("data_collator", "train_dataset", "eval_dataset", "compute_metrics")
        super().__init__(
            model, self.args, **{name: named.get(name) for name in same},
            processing_class=named.get("tokenizer") or named.get("image_processor"),
            callbacks=_list(named.get("callbacks")), optimizers=pair,
            peft_config=build_config(Settings(**self._adapters)),
        )  # fmt: skip

    def _choose_location(self, model: Any) -> str:
        if isinstance(model, nn.Module):
            return self._save_instance(model)
        if not model:
            raise ConfigurationError("Trainer needs a model: a name, a folder or an instance.")
        if Path(str(model)).expanduser().is_dir():
            return str(model)
        return MODELS.get(str(model).removeprefix("mindspore/"), str(model))

    def _save_instance(self, model: Any) -> str:
        """A model that was built by hand becomes a folder, from which a task loads it."""
        folder = self._output / "given_model"
        processor = self._named.get("tokenizer") or self._named.get("image_processor")
        if processor is None:
            raise ConfigurationError(
                "a model instance with data by path needs tokenizer= (or image_processor=)."
            )
        if get_world_size_from_environment() == 1 or self.args.process_index == 0:
            model.save_pretrained(folder)
            processor.save_pretrained(folder)
        return str(folder)

    @property
    def _output(self) -> Path:
        return Path(self.args.output_dir or "output")

    def set_parallel_config(self, **widths: Any) -> None:
        """How the processes divide the model; checked when training starts."""
        self._parallel = check_options("set_parallel_config", widths, PARALLEL_CONFIG)
        self._forget_engine()

    def set_recompute_config(self, **options: Any) -> None:
        """What is computed again in the backward pass."""
        self._recompute = check_options("set_recompute_config", options, RECOMPUTE_CONFIG)
        self._forget_engine()

    def _forget_engine(self) -> None:
        if self._is_instance:
            self._engine = None

    def build_settings(self) -> Settings:
        """The arguments, and what ``set_parallel_config`` and ``init_context`` were given."""
        return build_parallel_settings(self.args, self._parallel | self._recompute)

    def _build_task_settings(self, *, predicts: bool = False, **values: Any) -> Settings:
        if self.task_name not in TASKS:
            raise ConfigurationError(
                "task='general' needs a model instance; with a model's name, say one of "
                f"{', '.join(TASKS)}."
            )
        data = {"train_data": self.train_dataset, "valid_data": self.eval_dataset}
        paths: dict[str, Any] = {name: [str(path)] for name, path in data.items() if is_path(path)}
        known = {"task": TASKS[self.task_name], "pretrained_model_name_or_path": self._location}
        base = build_parallel_settings(
            self.args, self._parallel | self._recompute, allows_replicas=predicts
        )
        return base.replace(SOURCE, **{**known, **paths, **values})

    def _find_weights(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """True: the newest of this output folder; a text: a path or a model's name."""
        checkpoint = checkpoint or self._checkpoint
        if not checkpoint:
            adapter = self._find_adapter(is_adapter_folder) if self._adapters else None
            return {} if adapter is None else {"pretrained_model_name_or_path": adapter}
        name = MODELS.get(str(checkpoint), str(checkpoint))
        if checkpoint is True:
            folder = self._trained or _find_model(self._output)
            if folder is None:
                raise ConfigurationError(
                    f"checkpoint True: {self.args.output_dir} holds no model of an earlier run."
                )
            name = str(folder)
        return {"pretrained_model_name_or_path": name}

    def _find_adapter(self, is_one: Callable[[Path], bool]) -> str | None:
        """The adapter of an earlier run: ``pet_method`` says that one is meant."""
        folder = _find_model(self._output)
        method = self._named["pet_method"]
        if folder is None or not is_one(folder):
            warn_once(
                f"pet_method={method!r}: {self.args.output_dir} holds no trained adapter, so the "
                "model is used without one. Give the checkpoint of the adapter."
            )
            return None
        say_once(f"pet_method={method!r}: the adapter in {folder} is used.")
        return str(folder)

    def _find_adapter_of_instance(self) -> str | None:
        """The same for a model instance whose adapter is neither the user's nor trained here."""
        is_blank = self._engine is None and not self._has_trained
        # Without a name of its base, an adapter was merged into the model that was saved.
        return self._find_adapter(is_model_folder) if self._adds_adapter and is_blank else None

    def _load_into_instance(self, checkpoint: Checkpoint) -> None:
        """The same for a model instance, whose weights are replaced."""
        if not checkpoint:
            return
        folder = self._output if checkpoint is True else Path(checkpoint).expanduser()
        if self._engine is not None and get_world_size_from_environment() > 1:
            raise ConfigurationError(
                f"{folder}: weights cannot be loaded into a model that the processes already "
                "share. Load them before the first verb, or make a new Trainer."
            )
        load_weights(self.model, folder, best=(folder / BEST).is_dir())
        self._engine = None  # an optimizer may hold copies of the weights before

    @_SPEAKING
    def train(  # type: ignore[override]
        self,
        train_checkpoint: Checkpoint = False,
        resume_training: Checkpoint = None,
        auto_trans_ckpt: bool | None = None,
        do_eval: bool = False,
        *,
        resume_from_checkpoint: Checkpoint = None,
    ) -> Any:
        """Train from fresh weights, or from ``train_checkpoint``."""
        resumes = resume_training or resume_from_checkpoint
        return self._learn(train_checkpoint, resumes, do_eval, starts_fresh=True)

    @_SPEAKING
    def finetune(
        self,
        finetune_checkpoint: Checkpoint = False,
        resume_training: Checkpoint = None,
        auto_trans_ckpt: bool | None = None,
        do_eval: bool = False,
        *,
        resume_from_checkpoint: Checkpoint = None,
    ) -> Any:
        """Train from the model's own weights, or from ``finetune_checkpoint``."""
        resumes = resume_training or resume_from_checkpoint
        return self._learn(finetune_checkpoint, resumes, do_eval, starts_fresh=False)

    def _learn(
        self, checkpoint: Checkpoint, resumes: Checkpoint, do_eval: bool, *, starts_fresh: bool
    ) -> Any:
        if do_eval and self.eval_dataset is None:
            raise DataError("do_eval=True needs an eval_dataset.")
        if do_eval and self.args.eval_strategy == "no":
            self.args.eval_strategy = "epoch"
        resumes = resumes or getattr(self.args, "resume_training", None)
        if self._is_instance:
            self._load_into_instance(checkpoint)
            return super().train(resume_from_checkpoint=resumes)
        weights = self._find_weights(checkpoint) if checkpoint or self._checkpoint else {}
        if starts_fresh:
            weights = {**weights, "from_scratch": not weights}
        return self._run_training(resumes, **weights)

    def _run_training(self, resumes: Checkpoint, **values: Any) -> dict[str, float]:
        if self.train_dataset is None:
            raise DataError("Trainer: training needs a train_dataset.")
        if resumes:
            values["load"] = self.args.output_dir if resumes is True else str(resumes)
        settings = self._build_task_settings(**values, **self._adapters)
        has_metrics = self.compute_metrics is not None
        check_task(settings, reads_files=is_path(self.train_dataset), has_own_metrics=has_metrics)
        model = Path(values.get("pretrained_model_name_or_path", ""))
        if not resumes and model.parent == self._output and model.name in (BEST, LAST):
            # The earlier run of this folder is set aside before the weights are read.
            moved = model.parent / PREVIOUS / model.name
            settings = settings.replace(SOURCE, pretrained_model_name_or_path=str(moved))
        engine = RapidformerEngine(args=settings)
        if not resumes and not settings.overwrite and settings.save is not None:
            engine.checkpoints.hold_folder(Path(settings.save))
            set_aside(Path(settings.save))
        metrics = GivenTask(engine, settings, self).train()
        self._trained = _find_model(Path(engine.args.save)) if engine.args.save else None
        return metrics

    @_SPEAKING
    def evaluate(  # type: ignore[override]
        self,
        eval_checkpoint: Checkpoint = False,
        auto_trans_ckpt: bool | None = None,
        *,
        eval_dataset: Any = None,
        **options: Any,
    ) -> dict[str, Any]:
        """The metrics on the evaluation data: of what was trained here, or of the model."""
        if self._is_instance:
            self._load_into_instance(eval_checkpoint or self._find_adapter_of_instance())
            return super().evaluate(eval_dataset, **options)
        if eval_dataset is not None:
            self.eval_dataset = eval_dataset
        if self.eval_dataset is None:
            raise DataError("Trainer.evaluate() needs eval_dataset: a path, or a data set.")
        values = self._find_weights(eval_checkpoint or self._trained is not None)
        engine = RapidformerEngine(args=self._build_task_settings(**values, allow_untrained=True))
        rows = None if is_path(self.eval_dataset) else self.eval_dataset

        def measure_more(model: nn.Module, loader: Any) -> dict[str, float]:
            self.adopt_task(engine, model, None)
            return measure_own(self, loader)

        report = evaluate_task(engine, rows, measure_more if self.compute_metrics else None)
        metrics: dict[str, Any] = report.get_numbers()
        if "perplexity" in metrics:
            metrics["PPL"] = metrics["perplexity"]
        shown = " | ".join(f"{name} {value:.4f}" for name, value in report.metrics.items())
        get_logger().info("evaluation | %s", shown)
        return metrics

    @_SPEAKING
    def predict(  # type: ignore[override]
        self,
        predict_checkpoint: Checkpoint = None,
        auto_trans_ckpt: bool | None = None,
        input_data: Any = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> Any:
        """Answers to a text, a list of texts, a file with a text per line, or a data set."""
        if self._is_instance:
            self._load_into_instance(predict_checkpoint or self._find_adapter_of_instance())
            engine, before = self.engine, self.engine.args
            if batch_size is not None:
                engine.args = before.replace("predict()", eval_micro_batch_size=batch_size)
            try:
                return super().predict(input_data, **options)
            finally:
                engine.args = before
        if input_data is None:
            input_data = self.eval_dataset
        rows = read_prompts(input_data)
        values = self._find_weights(predict_checkpoint or self._trained is not None)
        values |= read_generation(options)
        if self.task_name == "text_generation":
            values["chat_template"] = "none"  # its prompts are continued, never answered
        if batch_size is not None:
            values["eval_micro_batch_size"] = batch_size
        settings = self._build_task_settings(**values, allow_untrained=True, predicts=True)
        answers = predict_task(RapidformerEngine(args=settings), rows)
        return rename_answers(self.task_name, rows, answers)


def _find_model(folder: Path) -> Path | None:
    return next(filter(is_model_folder, (folder / BEST, folder / LAST)), None)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value is not None else []
