"""TRL's trainers on Hugging Face's ``Trainer``: their data, loss and metrics are a task's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import transformers
from torch import nn
from transformers import AutoTokenizer

from rapidformer.accel.dropout_seeds import apply_no_dropout
from rapidformer.config import Settings
from rapidformer.dialects.huggingface.task_trainer import TaskTrainer
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
from rapidformer.models.adapter_folder import find_files
from rapidformer.models.configuration import get_position_limit, read_config
from rapidformer.models.towers import choose_auto_class
from rapidformer.objectives import Context, Objective
from rapidformer.objectives.objective import AskedModel
from rapidformer.objectives.reference import REFERENCE
from rapidformer.tasks.base import PreparedData, Task
from rapidformer.tasks.evaluation.evaluating import add_context
from rapidformer.tasks.grpo.rewards import weigh
from rapidformer.tasks.grpo.task import Grpo
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.text.text import TextParts, get_max_length

_TEXTS = ("prompt", "chosen", "completion")
"""Columns whose values are texts, or messages in a conversation."""


class TRLTrainer(TaskTrainer):
    """What TRL's trainers share."""

    room = "rapidformer.dialects.trl"
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
        *,
        quantization_config: Any = None,
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
        if model is None:
            raise ConfigurationError(f"{type(self).__name__} needs a model.")
        if isinstance(ref_model, str):
            ref_model = self._load(ref_model, args, quantization_config)
        if model is ref_model:
            raise ConfigurationError(
                "ref_model must not be the model that learns: leave it out, and the reference is "
                "what the model is now."
            )
        self.task, self._reference = self._build_task(args), ref_model
        if processing_class is None:
            processing_class = AutoTokenizer.from_pretrained(
                model if isinstance(model, str) else model.name_or_path,
                trust_remote_code=args.trust_remote_code,
            )
        if isinstance(model, str):
            model = self._load(model, args, quantization_config)
        elif quantization_config is not None:
            raise ConfigurationError(
                "quantization_config= is for a model given by its name: load yours with it."
            )
        if processing_class.pad_token is None:
            processing_class.pad_token = processing_class.eos_token
        super().__init__(
            model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset,
            processing_class=processing_class, **others,
        )  # fmt: skip
        if args.disable_dropout:
            apply_no_dropout(self.model)
        self.prepare_data()

    def _build_task(self, args: TaskConfig) -> Task:
        return get_task(args.task)

    def _load(self, name: str, args: TaskConfig, quantization_config: Any) -> nn.Module:
        init: Any = args.model_init_kwargs or {}
        options = {"trust_remote_code": args.trust_remote_code, **init}
        if quantization_config is not None:
            options["quantization_config"] = quantization_config
        if self.auto_class.endswith("Classification"):
            options["num_labels"] = 1
        config = read_config(
            str(find_files(name, "config.json")), trust_remote_code=args.trust_remote_code
        )
        auto_class = choose_auto_class(self.auto_class, config)
        return getattr(transformers, auto_class).from_pretrained(name, **options)

    def prepare_tables(self, tables: Mapping[str, Any]) -> PreparedData:
        """Tokenize TRL's rows, as the task does its own."""
        settings = self.build_settings()
        first = next(iter(tables.values()))[0]
        if not any(isinstance(first.get(name), (list, dict)) for name in _TEXTS):
            # Texts are joined as they are, whatever template the tokenizer has.
            settings = settings.replace("TRL's texts", chat_template="none")
        model: Any = self.model
        limit = get_position_limit(model.config)
        if limit is not None and (settings.seq_length or 0) > limit:
            settings = settings.replace("the model's positions", seq_length=limit)
        length = get_max_length(settings, self.processing_class, model.config)
        parts = TextParts(model.config, self.processing_class, length, settings)
        return self.task.prepare_tables(parts, tables)

    def build_settings(self) -> Settings:
        config = self.config_class.__name__
        return super().build_settings().replace(config, **self.args.list_settings())

    def build_objective(self) -> Objective:
        return self.task.build_objective(self.build_settings())

    def provide_frozen_models(self) -> Mapping[str, nn.Module]:
        """The reference, if the script has one: otherwise the run makes it."""
        reference = self._reference
        return {} if reference is None else {REFERENCE: reference.to(self.args.device)}

    def complete(self, prepared: PreparedData) -> PreparedData:
        if self.context is None:  # nothing is trained yet: the model is its own reference
            frozen: dict[str, nn.Module | AskedModel] = {
                REFERENCE: build_untouched(self.engine.model)
            }
            self.context = Context(frozen={**frozen, **self.provide_frozen_models()})
        return add_context(prepared, self.context)


class DPOTrainer(TRLTrainer):
    """Learns which of two answers is better."""

    config_class = DPOConfig


class KTOTrainer(TRLTrainer):
    """Learns whether an answer is good."""

    config_class = KTOConfig


class _WithoutReference(TRLTrainer):
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


class GRPOTrainer(TRLTrainer):
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
        names = [getattr(function, "__name__", "reward") for function in functions]
        wrapped = [_in_our_words(function) for function in functions]
        weights = getattr(args, "reward_weights", None)
        self._functions = weigh(list(zip(names, wrapped, strict=True)), weights)
        super().__init__(model, None, args, **others)

    def _build_task(self, args: TaskConfig) -> Task:
        return Grpo(self._functions)

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

    def build_objective(self) -> Objective:
        assert isinstance(self.task, Grpo)
        model: Any = self.model
        return self.task.build(self.build_settings(), self.processing_class, model.config)


def _in_our_words(function: Callable[..., Any]) -> Callable[..., Any]:
    """TRL's functions get ``completions``: messages if the prompts are, otherwise texts."""

    def reward(prompts: Sequence[Any], answers: Sequence[str], **columns: Any) -> Any:
        are_turns = not isinstance(prompts[0], str)
        turns = [[{"role": "assistant", "content": answer}] for answer in answers]
        columns["completion_ids"] = columns.pop("answer_ids")
        return function(prompts=prompts, completions=turns if are_turns else answers, **columns)

    return reward
