"""MindFormers' YAML files as arguments of its ``Trainer``; the rest is listed, to be said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rapidformer.dialects.calls import flatten
from rapidformer.dialects.mindformers.names import (
    DEFAULTS,
    PARALLEL_CONFIG,
    RECOMPUTE_CONFIG,
    TRAINING_ARGUMENTS,
)
from rapidformer.errors import ConfigurationError, raise_problems

# Keys -> names of TrainingArguments. Of two that give one value, the later one wins.
_ARGUMENTS = {
    "seed": "seed", "output_dir": "output_dir", "resume_training": "resume_training",
    "eval_step_interval": "eval_step_interval",
    "runner_config.epochs": "num_train_epochs", "runner_config.sink_mode": "sink_mode",
    "runner_config.sink_size": "sink_size", "runner_config.batch_size": "batch_size",
    "runner_config.gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_dataset.batch_size": "batch_size",
    "optimizer.type": "optim", "optimizer.learning_rate": "learning_rate",
    "optimizer.weight_decay": "weight_decay", "optimizer.eps": "adam_epsilon",
    "optimizer.beta1": "adam_beta1", "optimizer.beta2": "adam_beta2",
    "lr_schedule.type": "lr_scheduler_type", "lr_schedule.learning_rate": "learning_rate",
    "lr_schedule.lr_end": "lr_end", "lr_schedule.warmup_steps": "warmup_steps",
    "lr_schedule.warmup_ratio": "warmup_ratio",
    "context.device_target": "device_target",
    "parallel.enable_parallel_optimizer": "enable_parallel_optimizer",
    **{f"parallel_config.{name}": name for name in PARALLEL_CONFIG if name in TRAINING_ARGUMENTS},
    **{f"recompute_config.{name}": name for name in RECOMPUTE_CONFIG if name in TRAINING_ARGUMENTS},
}  # fmt: skip
_TRAINER = {
    "trainer.model_name": "model_name", "train_dataset.data_loader.dataset_dir": "train_dataset",
    "eval_dataset.data_loader.dataset_dir": "eval_dataset",
}  # fmt: skip
_TASKS = {
    "CausalLanguageModelingTrainer": "text_generation", "TranslationTrainer": "translation",
    "TextClassificationTrainer": "text_classification",
    "TokenClassificationTrainer": "token_classification",
    "QuestionAnsweringTrainer": "question_answering", "MaskedLanguageModelingTrainer": "fill_mask",
    "ImageClassificationTrainer": "image_classification",
}  # fmt: skip
_SCHEDULES = {
    "CosineWithWarmUpLR": "cosine", "LinearWithWarmUpLR": "linear",
    "ConstantWarmUpLR": "constant_with_warmup", "PolynomialWithWarmUpLR": "polynomial",
}  # fmt: skip
_CALLBACKS = {
    "CheckpointMointor.save_checkpoint_steps": "save_steps",
    "CheckpointMointor.keep_checkpoint_max": "save_total_limit",
    "MFLossMonitor.per_print_times": "logging_steps",
}
# What the caller of a verb says, follows from the rest or is read by itself.
_UNSAID = {
    "run_mode", "use_parallel", "do_eval", "lr_schedule.total_steps", "trainer.type",
    "load_checkpoint", "callbacks", "optimizer.betas",
}  # fmt: skip
_BATCH_SIZES = ("runner_config.batch_size", "train_dataset.batch_size")


@dataclass(kw_only=True)
class MindFormersFile:
    """A file's content, sorted by who needs it."""

    arguments: dict[str, Any]
    """For ``TrainingArguments``."""
    trainer: dict[str, Any]
    """For ``Trainer``."""
    checkpoint: str | None
    """The weights that a verb without a checkpoint starts from."""
    unused: list[str]


def load_mindformers_file(path: str | Path) -> MindFormersFile:
    """Read a file; every problem is in the one ConfigurationError."""
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as reason:
        raise ConfigurationError(f"args={str(path)!r} cannot be read: {reason}.") from None
    except yaml.YAMLError as reason:
        text = " ".join(str(reason).split())
        raise ConfigurationError(f"args={str(path)!r} is not a YAML file: {text}.") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"args={str(path)!r} must hold names with values.")
    return _sort(content, str(path))


def _sort(content: Mapping[str, Any], path: str) -> MindFormersFile:
    problems: list[str] = []
    values = {key: value for key, value in flatten(content, ".") if value not in (None, "", [])}
    is_alone = content.get("use_parallel") is False
    sizes = {key: values[key] for key in _BATCH_SIZES if key in values}
    if len(set(sizes.values())) > 1:
        listed = " and ".join(f"{key} {size}" for key, size in sizes.items())
        problems.append(f"{listed} in {path} are one value: make them equal.")
    arguments = {
        name: values[key]
        for key, name in _ARGUMENTS.items()
        if key in values and not (is_alone and key.startswith("parallel"))
    }
    if (betas := values.get("optimizer.betas")) is not None:
        arguments["adam_beta1"], arguments["adam_beta2"] = betas
    arguments |= _read_callbacks(content.get("callbacks"))
    kind = arguments.get("lr_scheduler_type")
    if kind is not None and kind not in (*_SCHEDULES, *_SCHEDULES.values()):
        problems.append(
            f"lr_schedule.type {kind} in {path} is not supported: use {', '.join(_SCHEDULES)}."
        )
    elif kind is not None:
        arguments["lr_scheduler_type"] = _SCHEDULES.get(kind, kind)
    raise_problems(problems)
    trainer = {name: values[key] for key, name in _TRAINER.items() if key in values}
    if (task := _TASKS.get(str(values.get("trainer.type")))) is not None:
        trainer["task"] = task
    ignored = {f"parallel_config.{name}" for name in PARALLEL_CONFIG}
    ignored |= {f"recompute_config.{name}" for name in RECOMPUTE_CONFIG}
    unused = sorted(values.keys() - _ARGUMENTS.keys() - _TRAINER.keys() - _UNSAID - ignored)
    return MindFormersFile(
        arguments=arguments, trainer=trainer, checkpoint=values.get("load_checkpoint"),
        # Their first two parts, each once.
        unused=list(dict.fromkeys(".".join(key.split(".")[:2]) for key in unused)),
    )  # fmt: skip


def _read_callbacks(callbacks: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    listed = callbacks if isinstance(callbacks, list) else []
    for callback in (entry for entry in listed if isinstance(entry, dict)):
        kind = str(callback.get("type")).replace("CheckpointMonitor", "CheckpointMointor")
        for name, value in callback.items():
            ours = _CALLBACKS.get(f"{kind}.{name}")
            if ours is not None and value is not None:
                values[ours] = value
    if values.get("logging_steps") == DEFAULTS["logging_steps"]:
        del values["logging_steps"]  # sink_size may say otherwise
    return values
