"""TRL's trainers on Hugging Face's ``Trainer``: their data, loss and metrics are a task's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

from torch import nn
from transformers.trainer_utils import EvalLoopOutput

from rapidformer.accel.dropout_seeds import apply_no_dropout
from rapidformer.config import Settings
from rapidformer.dialects.huggingface.interface import Keys
from rapidformer.dialects.huggingface.trainer import Trainer
from rapidformer.dialects.trl.configs import (
    CPOConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ORPOConfig,
    RewardConfig,
    TaskConfig,
)
from rapidformer.engine.reference import build_untouched
from rapidformer.errors import ConfigurationError
from rapidformer.models.configuration import get_position_limit
from rapidformer.objectives import Context, Objective
from rapidformer.objectives.objective import AskedModel
from rapidformer.objectives.reference import REFERENCE
from rapidformer.tasks.base import PreparedData
from rapidformer.tasks.evaluation.evaluating import measure
from rapidformer.tasks.evaluation.frozen import add_context
from rapidformer.tasks.grpo.rewards import RewardFunction
from rapidformer.tasks.grpo.task import Grpo
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.text.text import TextParts, get_max_length

_TEXTS = ("prompt", "chosen", "completion")
"""Columns whose values are texts, or messages in a conversation."""


class TaskTrainer(Trainer):
    """A trainer of rows, not of batches: what it learns is a task's objective."""

    room = "rapidformer.dialects.trl"
    smooths_labels = False
    config_class: ClassVar[type[TaskConfig]]
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    args: TaskConfig

    def __init__(
        self,
        model: Any = None,
        ref_model: Any = None,
        args: TaskConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **others: Any,
    ) -> None:
        """The names and their order are TRL's; ``others`` are those of ``Trainer``."""
        args = args if args is not None else self.config_class("trainer_output")
        if not isinstance(args, self.config_class):
            raise ConfigurationError(
                f"{type(self).__name__} takes a {self.config_class.__name__}, got "
                f"{type(args).__name__}."
            )
        if data_collator is not None:
            raise ConfigurationError(
                f"{type(self).__name__}(data_collator=...) is not supported: rows are tokenized "
                "and padded by the trainer."
            )
        self._task, self._reference = get_task(args.task), ref_model
        if isinstance(model, str):
            model, processing_class = self._load(model, processing_class, args)
        elif processing_class is None:
            processing_class = _load_tokenizer(model.name_or_path)
        if processing_class.pad_token is None:
            processing_class.pad_token = processing_class.eos_token
        if args.disable_dropout:
            apply_no_dropout(model)
        super().__init__(
            model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset,
            processing_class=processing_class, **others,
        )  # fmt: skip
        self.prepared = self.prepare_rows({"train": train_dataset, "validation": eval_dataset})
        self.train_dataset, self.eval_dataset = self.prepared.train, self.prepared.validation
        self.data_collator = self.prepared.collate

    def _load(self, name: str, tokenizer: Any, args: TaskConfig) -> tuple[nn.Module, Any]:
        import transformers

        given: Any = args.model_init_kwargs or {}
        options = {"trust_remote_code": args.trust_remote_code, **given}
        if self.auto_class.endswith("Classification"):
            options["num_labels"] = 1
        model = getattr(transformers, self.auto_class).from_pretrained(name, **options)
        return model, _load_tokenizer(name) if tokenizer is None else tokenizer

    def prepare_rows(self, splits: Mapping[str, Any]) -> PreparedData:
        """Tokenize TRL's rows, as the task does its own."""
        tables = {name: rows for name, rows in splits.items() if rows is not None}
        settings = self.build_settings()
        if tables and not _has_turns(next(iter(tables.values()))):
            # Texts are joined as they are, whatever template the tokenizer has.
            settings = settings.replace("TRL's texts", chat_template="none")
        model: Any = self.model
        limit = get_position_limit(model.config)
        if limit is not None and (settings.seq_length or 0) > limit:
            settings = settings.replace("the model's positions", seq_length=limit)
        length = get_max_length(settings, self.processing_class, model.config)
        parts = TextParts(model.config, self.processing_class, length, settings)
        return self._task.prepare_tables(parts, tables)  # type: ignore[attr-defined, no-any-return]

    def build_settings(self) -> Settings:
        config = self.config_class.__name__
        return super().build_settings().replace(config, **self.args.list_settings())

    def build_objective(self) -> Objective:
        return self._task.build_objective(self.build_settings())

    def provide_frozen_models(self) -> Mapping[str, nn.Module]:
        """The reference, if one was given: otherwise the run makes it."""
        given = self._reference
        return {} if given is None else {REFERENCE: given.to(self.args.device)}

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = []  # the collate function reads rows, not the model

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        if eval_dataset is not None and eval_dataset is not self.eval_dataset:
            eval_dataset = self.prepare_rows({"validation": eval_dataset}).validation
        return super().get_eval_dataloader(eval_dataset)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Keys = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The task's metrics, each row once."""
        engine = self.engine
        loader = engine.data.adopt_loader(dataloader, is_training=False)
        if self.context is None:  # nothing is trained yet: the model is its own reference
            frozen: dict[str, nn.Module | AskedModel] = {REFERENCE: build_untouched(engine.model)}
            self.context = Context(frozen={**frozen, **self.provide_frozen_models()})
        prepared = add_context(self.prepared, self.context)
        with ExitStack() as stack:
            if not self._is_training or self.model.training:
                stack.enter_context(engine.model.evaluating())
            tally = measure(engine, self._task, self.model, loader, prepared, "validation")
        metrics = {f"{metric_key_prefix}_{name}": v for name, v in tally.compute().items()}
        return EvalLoopOutput(None, None, metrics, tally.examples)  # type: ignore[arg-type]


class DPOTrainer(TaskTrainer):
    """Learns which of two answers is better."""

    config_class = DPOConfig


class KTOTrainer(TaskTrainer):
    """Learns whether an answer is good."""

    config_class = KTOConfig


class _WithoutReference(TaskTrainer):
    def __init__(self, model: Any = None, args: Any = None, **others: Any) -> None:
        super().__init__(model, None, args, **others)


class RewardTrainer(_WithoutReference):
    """Learns to score answers."""

    config_class = RewardConfig
    auto_class = "AutoModelForSequenceClassification"


class ORPOTrainer(_WithoutReference):
    """Learns answers, and that others are worse."""

    config_class = ORPOConfig


class CPOTrainer(_WithoutReference):
    """Learns which of two answers is better by SimPO."""

    config_class = CPOConfig


class GRPOTrainer(TaskTrainer):
    """Learns from functions that score its answers."""

    config_class = GRPOConfig
    args: GRPOConfig

    def __init__(
        self, model: Any = None, reward_funcs: Any = None, args: Any = None, **others: Any
    ) -> None:
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        if not all(callable(f) and not isinstance(f, nn.Module) for f in functions):
            raise ConfigurationError(
                "GRPOTrainer(reward_funcs=...) takes functions of (prompts, completions, "
                "**columns); a reward model can be called in one."
            )
        weights = (args.reward_weights if args is not None else None) or [1.0] * len(functions)
        if len(weights) != len(functions):
            raise ConfigurationError(
                f"reward_weights has {len(weights)} numbers for {len(functions)} functions."
            )
        pairs = zip(functions, weights, strict=True)
        self.reward_functions = [
            RewardFunction(getattr(f, "__name__", "reward"), _in_our_words(f), weight)
            for f, weight in pairs
        ]
        super().__init__(model, None, args, **others)

    def build_settings(self) -> Settings:
        """In prompts: TRL's batches count answers."""
        settings, args = super().build_settings(), self.args
        size, group = args.per_device_train_batch_size, args.num_generations
        answers = size * args.world_size * args.gradient_accumulation_steps
        micro = max(1, size // group)
        if answers % (group * micro * args.world_size):
            raise ConfigurationError(
                f"per_device_train_batch_size {size} x {args.world_size} processes x "
                f"gradient_accumulation_steps {args.gradient_accumulation_steps} = {answers} "
                f"answers are not whole groups of num_generations {group} on each process."
            )
        return settings.replace(
            "GRPOConfig", micro_batch_size=micro, global_batch_size=answers // group,
            gradient_accumulation_steps=answers // (group * micro * args.world_size),
            eval_micro_batch_size=args.per_device_eval_batch_size,
        )  # fmt: skip

    def prepare_rows(self, splits: Mapping[str, Any]) -> PreparedData:
        assert isinstance(self._task, Grpo)
        self._task = Grpo(self.reward_functions)
        return super().prepare_rows(splits)

    def build_objective(self) -> Objective:
        assert isinstance(self._task, Grpo)
        model: Any = self.model
        return self._task.build(self.build_settings(), self.processing_class, model.config)


def _in_our_words(function: Callable[..., Any]) -> Callable[..., Any]:
    """TRL's functions get ``completions``: messages if the prompts are, otherwise texts."""

    def reward(prompts: Sequence[Any], answers: Sequence[str], **columns: Any) -> Any:
        are_turns = not isinstance(prompts[0], str)
        turns = [[{"role": "assistant", "content": answer}] for answer in answers]
        columns["completion_ids"] = columns.pop("answer_ids")
        return function(prompts=prompts, completions=turns if are_turns else answers, **columns)

    return reward


def _load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def _has_turns(rows: Any) -> bool:
    """Whether rows are conversations."""
    first = rows[0]
    return any(isinstance(first.get(name), (list, dict)) for name in _TEXTS)
