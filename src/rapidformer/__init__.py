"""rapidformer: train PyTorch transformers with switches that never change the result.

Public names are resolved on first use, so that ``import rapidformer`` (and ``rapidformer --help``)
does not import torch. Importing changes nothing in the process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rapidformer.foreign_names import register

if TYPE_CHECKING:
    from rapidformer.checkpoint.exporting.export import export
    from rapidformer.cli.evaluate import evaluate
    from rapidformer.cli.predict import predict
    from rapidformer.cli.train import train
    from rapidformer.context import get_args, get_timers, get_tokenizer
    from rapidformer.data.pretraining import (
        build_pretrain_huggingface_bert_datasets,
        build_train_valid_test_datasets,
        build_train_valid_test_datasets_for_huggingface,
        get_ltor_masks_and_position_ids,
    )
    from rapidformer.data.streams.listing import open_stream
    from rapidformer.dialects.accelerate.accelerator import Accelerator, set_seed
    from rapidformer.dialects.accelerate.processes import DistributedType
    from rapidformer.dialects.accelerate.settings import DeepSpeedPlugin, ProjectConfiguration
    from rapidformer.dialects.huggingface.arguments import (
        Seq2SeqTrainingArguments,
        TrainingArguments,
    )
    from rapidformer.dialects.huggingface.seq2seq import Seq2SeqTrainer
    from rapidformer.dialects.huggingface.trainer import Trainer
    from rapidformer.dialects.sentence_transformers import (
        CrossEncoder,
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from rapidformer.dialects.trl import (
        CPOConfig,
        CPOTrainer,
        DPOConfig,
        DPOTrainer,
        GRPOConfig,
        GRPOTrainer,
        KTOConfig,
        KTOTrainer,
        ORPOConfig,
        ORPOTrainer,
        RewardConfig,
        RewardTrainer,
    )
    from rapidformer.dist import mpu
    from rapidformer.engine import RapidformerEngine
    from rapidformer.errors import RapidformerError
    from rapidformer.log import get_logger
    from rapidformer.models.gpt import GPTModel
    from rapidformer.models.plan import ModelPlan
    from rapidformer.tasks.metrics.loading import load_metric
    from rapidformer.training.finetuner import Finetuner
    from rapidformer.training.pretrainer import PreTrainer
    from rapidformer.training.pretrainer import PreTrainer as Pretrainer

__all__ = [
    "Accelerator", "CPOConfig", "CPOTrainer", "CrossEncoder", "CrossEncoderTrainer",
    "CrossEncoderTrainingArguments", "DPOConfig", "DPOTrainer", "DeepSpeedPlugin",
    "DistributedType", "Finetuner", "GPTModel", "GRPOConfig", "GRPOTrainer", "KTOConfig",
    "KTOTrainer", "ModelPlan", "ORPOConfig", "ORPOTrainer", "PreTrainer", "Pretrainer",
    "ProjectConfiguration", "RapidformerEngine", "RapidformerError", "RewardConfig",
    "RewardTrainer", "SentenceTransformer", "SentenceTransformerTrainer",
    "SentenceTransformerTrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer",
    "TrainingArguments",
    "build_pretrain_huggingface_bert_datasets", "build_train_valid_test_datasets",
    "build_train_valid_test_datasets_for_huggingface", "evaluate", "export", "get_args",
    "get_logger", "get_ltor_masks_and_position_ids", "get_timers", "get_tokenizer",
    "load_metric", "mpu", "open_stream", "predict", "set_seed", "train",
]  # fmt: skip

# Module -> the public names in it; `mpu` is a module itself, and `Pretrainer` an older name.
_NAMES = {
    "checkpoint.exporting.export": "export", "cli.evaluate": "evaluate", "cli.predict": "predict",
    "cli.train": "train", "context": "get_args get_timers get_tokenizer",
    "data.pretraining": "build_pretrain_huggingface_bert_datasets build_train_valid_test_datasets "
    "build_train_valid_test_datasets_for_huggingface get_ltor_masks_and_position_ids",
    "data.streams.listing": "open_stream",
    "dialects.accelerate.accelerator": "Accelerator set_seed",
    "dialects.accelerate.processes": "DistributedType",
    "dialects.accelerate.settings": "DeepSpeedPlugin ProjectConfiguration",
    "dialects.huggingface.arguments": "Seq2SeqTrainingArguments TrainingArguments",
    "dialects.huggingface.seq2seq": "Seq2SeqTrainer", "dialects.huggingface.trainer": "Trainer",
    "dialects.sentence_transformers": "CrossEncoder CrossEncoderTrainer "
    "CrossEncoderTrainingArguments SentenceTransformer SentenceTransformerTrainer "
    "SentenceTransformerTrainingArguments",
    "dialects.trl": "CPOConfig CPOTrainer DPOConfig DPOTrainer GRPOConfig GRPOTrainer KTOConfig "
    "KTOTrainer ORPOConfig ORPOTrainer RewardConfig RewardTrainer",
    "dist": "mpu", "engine": "RapidformerEngine", "errors": "RapidformerError", "log": "get_logger",
    "models.gpt": "GPTModel", "models.plan": "ModelPlan",
    "tasks.metrics.loading": "load_metric", "training.finetuner": "Finetuner",
    "training.pretrainer": "PreTrainer Pretrainer",
}  # fmt: skip
_WHERE = {name: f"rapidformer.{module}" for module in _NAMES for name in _NAMES[module].split()}
# Names of a dialect that were public here, and where they are.
_OF_DIALECTS = dict.fromkeys(
    ("ContextConfig", "ParallelContextConfig", "init_context"), "rapidformer.dialects.mindformers"
)


register(lambda: importlib.import_module("rapidformer.dialects.flags").FLAGS)


def __getattr__(name: str) -> Any:
    if name in _OF_DIALECTS:
        # Not an AttributeError: `from rapidformer import name` would replace its text.
        raise ImportError(f"{name} has moved: write `from {_OF_DIALECTS[name]} import {name}`.")
    if name not in _WHERE:
        raise AttributeError(f"module 'rapidformer' has no attribute {name!r}")
    if name == "mpu":
        return importlib.import_module("rapidformer.dist.mpu")
    return getattr(importlib.import_module(_WHERE[name]), name.replace("Pretrainer", "PreTrainer"))


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
