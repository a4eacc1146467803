"""The arguments of TRL's trainers: its names and defaults (1.16), and what each is called here.

A row says what becomes of a name, as in ``dialects/huggingface/names.py``; those of
``TrainingArguments`` mean what they mean there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from rapidformer.dialects.calls import check_names
from rapidformer.dialects.huggingface.arguments import TrainingArguments, takes_former_names
from rapidformer.dialects.huggingface.names import HUGGING_FACE, list_changed, read_rows
from rapidformer.errors import ConfigurationError, raise_problems
from rapidformer.foreign_names import ForeignName, honoured, ignored, mapped, refused
from rapidformer.log import warn_once

_PADDING = ignored("rows are padded to the longest of their batch", default="auto")
_SYNC = refused("the reference is what the run started from")
_VLLM = refused("answers are drawn by the model itself; there is no inference server")


@dataclass(repr=False)
class TaskConfig(TrainingArguments):
    """What the configurations of TRL's trainers share."""

    task: ClassVar[str] = "preference"
    loss: ClassVar[str | None] = None
    others: ClassVar[Mapping[str, str]] = {}
    """Names of TRL's that it does not have, and why; ``vllm_`` stands for many."""
    logging_steps: float = 10
    gradient_checkpointing: bool = True
    bf16: bool | None = None  # type: ignore[assignment]
    learning_rate: float = 1e-6
    model_init_kwargs: Annotated[dict[str, Any] | str | None, honoured(
        "passed to from_pretrained() if the model is a name")] = None  # fmt: skip
    trust_remote_code: Annotated[bool, mapped("trust_remote_code")] = False
    disable_dropout: Annotated[bool, honoured("off in model and reference")] = True
    dataset_num_proc: Annotated[int | None, mapped("preprocessing_workers")] = None
    max_length: Annotated[int | None, mapped("seq_length")] = 1024
    pad_to_multiple_of: Annotated[int | str | None, _PADDING] = "auto"
    activation_offloading: Annotated[bool, mapped("activation_offload")] = False

    def __post_init__(self) -> None:
        if isinstance(self.model_init_kwargs, str):
            self.model_init_kwargs = _parse(self.model_init_kwargs)
        if self.bf16 is None:
            self.bf16 = not self.fp16 and _has_bf16(self)
        super().__post_init__()
        problems: list[str] = []
        table = self.get_table()
        changed = {name: getattr(self, name) for name in list_changed(self) if name in table}
        check_names(type(self).__name__, changed, table, problems)
        raise_problems(problems)

    @classmethod
    def get_table(cls) -> dict[str, ForeignName]:
        """The names that are TRL's own, and what becomes of them."""
        return {name: row for name, row in read_rows(cls).items() if name not in HUGGING_FACE}

    def list_settings(self) -> dict[str, Any]:
        """The settings that they stand for."""
        rows = self.get_table().items()
        named = {row.setting: getattr(self, name) for name, row in rows if row.outcome == "mapped"}
        named |= {"task": self.task, "loss": named.get("loss", self.loss)}
        return {name: value for name, value in named.items() if value is not None}


def _parse(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigurationError(
            f"model_init_kwargs={text!r} is not a JSON object such as "
            '\'{"attn_implementation": "sdpa"}\'.'
        )
    return options


def _has_bf16(config: Any) -> bool:
    """Whether the device computes in bf16: TRL's default, which a CPU is better without."""
    import torch

    is_cuda = torch.cuda.is_available() and not config.use_cpu
    return is_cuda and torch.cuda.is_bf16_supported()


@dataclass(repr=False)
class ReferenceConfig(TaskConfig):
    """What configurations with a reference share."""

    beta: Annotated[float, mapped("beta")] = 0.1
    precompute_ref_log_probs: Annotated[bool, refused(
        "`rapidformer --task preference --precompute-reference` has it")] = False  # fmt: skip
    precompute_ref_batch_size: Annotated[int | None, ignored("nothing is precomputed")] = None
    sync_ref_model: Annotated[bool, _SYNC] = False
    ref_model_mixup_alpha: Annotated[float, ignored("the reference stays")] = 0.6
    ref_model_sync_steps: Annotated[int, ignored("the reference stays")] = 512


@dataclass(repr=False)
class PlainConfig(TaskConfig):
    """What configurations without a reference share."""

    beta: Annotated[float, mapped("beta")] = 0.1
    max_completion_length: Annotated[int | None, refused(
        "prompt and answer share max_length")] = None  # fmt: skip
    generate_during_eval: Annotated[bool, refused("evaluation compares given answers")] = False
    is_encoder_decoder: Annotated[bool | None, refused("only decoders")] = None


@takes_former_names
@dataclass(repr=False)
class DPOConfig(ReferenceConfig):
    """How to learn from pairs of answers."""

    others: ClassVar[Mapping[str, str]] = {
        "pad_token": "set tokenizer.pad_token", "padding_free": "leave it out: unpad",
    }  # fmt: skip
    truncation_mode: Annotated[str, refused("answers are cut at their end")] = "keep_start"
    loss_type: Annotated[list[str] | str, honoured(
        "sigmoid, sigmoid_norm, ipo, hinge, robust or apo_zero, alone or with sft",
        "loss")] = dataclasses.field(default_factory=lambda: ["sigmoid"])  # fmt: skip
    loss_weights: Annotated[list[float] | None, honoured(
        "the other loss weighs 1", "sft_weight")] = None  # fmt: skip
    ld_alpha: Annotated[float | None, refused("every answer counts in full")] = None
    f_divergence_type: Annotated[str, refused("only reverse_kl")] = "reverse_kl"
    f_alpha_divergence_coef: Annotated[float, ignored("there is no alpha divergence")] = 0.5
    label_smoothing: Annotated[float, honoured(
        "for robust alone, as in TRL", "label_smoothing")] = 0.0  # fmt: skip
    use_weighting: Annotated[bool, refused("every pair weighs the same")] = False
    discopop_tau: Annotated[float, ignored("there is no discopop loss")] = 0.05

    def list_settings(self) -> dict[str, Any]:
        kinds = [self.loss_type] if isinstance(self.loss_type, str) else list(self.loss_type)
        numbers = self.loss_weights or [1.0] * len(kinds)
        weights = dict(zip(kinds, numbers, strict=False))
        sft = weights.pop("sft", 0.0)
        known = ("sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "apo_zero")
        is_one = [*weights.values()] == [1.0] and weights.keys() <= {*known}
        if not is_one or len(numbers) != len(kinds):
            raise ConfigurationError(
                f"DPOConfig(loss_type={self.loss_type!r}, loss_weights={self.loss_weights!r}): use "
                f"one of {', '.join(known)} with the weight 1, alone or with sft."
            )
        (kind,) = weights
        values = {"loss": kind.removesuffix("_norm"), "sft_weight": sft}
        if kind == "robust":
            values["label_smoothing"] = self.label_smoothing
        elif self.label_smoothing:
            warn_once(
                f"DPOConfig(label_smoothing={self.label_smoothing}) has no effect with "
                f"loss_type={kind!r}, as in TRL: `rapidformer --label-smoothing` has one."
            )
        if kind == "sigmoid_norm":
            values["length_normalized"] = True
        return {**super().list_settings(), **values}


@takes_former_names
@dataclass(repr=False)
class KTOConfig(ReferenceConfig):
    """How to learn from single answers that are good or bad."""

    loss: ClassVar[str | None] = "kto"
    train_sampling_strategy: str = "sequential"
    loss_type: Annotated[str, refused("only kto")] = "kto"
    desirable_weight: Annotated[float, mapped("desirable_weight")] = 1.0
    undesirable_weight: Annotated[float, mapped("undesirable_weight")] = 1.0


@takes_former_names
@dataclass(repr=False)
class RewardConfig(TaskConfig):
    """How to learn to score answers."""

    task: ClassVar[str] = "reward"
    others: ClassVar[Mapping[str, str]] = {"pad_token": "set tokenizer.pad_token"}
    learning_rate: float = 1e-4
    chat_template_path: Annotated[str | None, mapped("chat_template")] = None
    eos_token: Annotated[str | None, refused("the tokenizer's own ends a row")] = None
    center_rewards_coefficient: Annotated[float | None, mapped("center_rewards_coefficient")] = None


@takes_former_names
@dataclass(repr=False)
class ORPOConfig(PlainConfig):
    """How to learn answers and preferences at once, without a reference."""

    loss: ClassVar[str | None] = "orpo"
    padding_value: Annotated[int | None, ignored("the tokenizer's own")] = None


@takes_former_names
@dataclass(repr=False)
class CPOConfig(PlainConfig):
    """SimPO; CPO's own loss is not supported."""

    loss: ClassVar[str | None] = "simpo"
    label_smoothing: Annotated[float, mapped("label_smoothing")] = 0.0
    loss_type: Annotated[str, honoured("simpo alone", "loss")] = "sigmoid"
    cpo_alpha: Annotated[float, mapped("sft_weight")] = 1.0
    simpo_gamma: Annotated[float, mapped("simpo_gamma")] = 0.5
    alpha: Annotated[float, refused("AlphaPO's rewards are not supported")] = 0.0

    def list_settings(self) -> dict[str, Any]:
        if self.loss_type != "simpo":
            raise ConfigurationError(
                f"CPOConfig(loss_type={self.loss_type!r}) is not supported: use loss_type='simpo' "
                "(SimPO as published has cpo_alpha=0), or DPOTrainer."
            )
        return super().list_settings()


@takes_former_names
@dataclass(repr=False)
class GRPOConfig(TaskConfig):
    """How to learn from rewards. ``per_device_train_batch_size`` counts answers, as in TRL."""

    task: ClassVar[str] = "grpo"
    others: ClassVar[Mapping[str, str]] = {
        "vllm_": "answers are drawn by the model itself; there is no inference server",
        "use_transformers_": "answers are drawn batch by batch", "sapo_": "there is no such loss",
        "vespo_": "there is no such loss", "entropy_": "there is no entropy bonus",
        "use_adaptive_entropy": "there is no entropy bonus",
        "max_tool_calling_iterations": "answers call no tools",
        "generation_kwargs": "give temperature, top_p, top_k or min_p",
        "cast_lm_head_to_fp32": "log-probabilities are always computed in fp32",
    }  # fmt: skip
    max_length: Annotated[int | None, mapped("seq_length")] = None
    disable_dropout: Annotated[bool, honoured("always off")] = True
    num_generations: Annotated[int, mapped("num_generations")] = 8
    num_generations_eval: Annotated[int | None, refused("the likeliest answer")] = None
    max_completion_length: Annotated[int, mapped("max_new_tokens")] = 512
    shuffle_dataset: Annotated[bool, honoured("the order of the prompts")] = True
    generation_batch_size: Annotated[int | None, refused("that of an update")] = None
    steps_per_generation: Annotated[int | None, refused("that of an update")] = None
    temperature: Annotated[float, mapped("temperature")] = 1.0
    top_p: Annotated[float, mapped("top_p")] = 1.0
    top_k: Annotated[int, honoured("0 = all", "top_k")] = 0
    min_p: Annotated[float | None, mapped("min_p")] = None
    repetition_penalty: Annotated[float, refused("it would change the probabilities")] = 1.0
    chat_template_kwargs: Annotated[dict[str, Any] | None, honoured(
        "variables of the chat template", "chat_template_kwargs")] = None  # fmt: skip
    use_vllm: Annotated[bool, _VLLM] = False
    beta: Annotated[float, mapped("beta")] = 0.0
    num_iterations: Annotated[int, mapped("updates_per_generation")] = 1
    epsilon: Annotated[float, mapped("clip_epsilon")] = 0.2
    epsilon_high: Annotated[float | None, mapped("clip_epsilon_high")] = None
    delta: Annotated[float | None, refused("ratios have one bound")] = None
    importance_sampling_level: Annotated[str, refused("only token")] = "token"
    reward_weights: Annotated[list[float] | None, mapped("reward_weights")] = None
    multi_objective_aggregation: Annotated[str, refused(
        "rewards are added up first")] = "sum_then_normalize"  # fmt: skip
    scale_rewards: Annotated[str, honoured(
        "True = group, False = none", "scale_rewards")] = "group"  # fmt: skip
    loss_type: Annotated[str, mapped("loss")] = "dapo"
    mask_truncated_completions: Annotated[bool, refused("every answer counts")] = False
    sync_ref_model: Annotated[bool, _SYNC] = False
    top_entropy_quantile: Annotated[float, refused("every token counts")] = 1.0
    off_policy_mask_threshold: Annotated[float | None, refused("every answer counts")] = None
    use_bias_correction_kl: Annotated[bool, mapped("kl_correction")] = True
    log_completions: Annotated[bool, ignored("an answer is in the log now and then")] = False
    num_completions_to_print: Annotated[int | None, ignored("one")] = None

    def list_settings(self) -> dict[str, Any]:
        scale: Any = self.scale_rewards  # a bool in older scripts
        if isinstance(scale, bool):
            scale = "group" if scale else "none"
        values: dict[str, Any] = {"scale_rewards": scale, "top_k": self.top_k or None}
        if not self.shuffle_dataset:
            values["dataloader_type"] = "single"
        if self.chat_template_kwargs:
            values["chat_template_kwargs"] = json.dumps(self.chat_template_kwargs)
        return {**super().list_settings(), **values}
