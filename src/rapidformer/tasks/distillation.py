"""Learn from a teacher: its distribution over each token of the answers, mixed with the labels.

The rows are those of ``causal_lm``, and so is everything but the loss. The teacher is a second,
frozen model beside the student, under the student's layout unless the settings say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.config.objective_sections import DistillationArguments
from rapidformer.errors import ModelError, raise_problems
from rapidformer.log import get_logger
from rapidformer.models.location import check_folder, find_model_folder, get_model_location
from rapidformer.tasks.base import Batch, FrozenModel, PreparedData, Record
from rapidformer.tasks.causal_lm import CausalLM

if TYPE_CHECKING:
    from torch import nn

    from rapidformer.objectives import Objective

_BETAS = {"forward": 0.0, "reverse": 1.0}
# What the settings say about the student alone.
_STUDENTS = {
    "from_scratch": False, "allow_partial_load": False,
    **dict.fromkeys((
        "load", "model_type", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
        "max_position_embeddings", "vocab_size", "hidden_dropout", "attention_dropout",
        "init_method_std", "lora_rank", "peft_config", "quantize_base", "tokenizer_type",
        "vocab_file", "merge_file", "tokenizer_name_or_path",
    )),
}  # fmt: skip
_SIZES = ("from_scratch", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
_SHARDED = {
    "zero_1_memory_optimization": False, "zero_2_memory_optimization": False,
    "zero_3_memory_optimization": True,
}  # fmt: skip
_WHOLE = {
    **dict.fromkeys((*_SHARDED, "fsdp_memory_optimization", "cpu_offload"), False),
    "tensor_model_parallel_size": 1, "sequence_parallel": False, "pipeline_model_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": None, "pipeline_schedule": None,
}  # fmt: skip


class Distillation(CausalLM):
    name = "distillation"
    description = (
        "learn a teacher's distribution over the next token (--teacher), in plain text, "
        "conversations or answers to prompts"
    )
    notes = (
        "The loss is alpha x temperature^2 x divergence + (1 - alpha) x label loss, per answer "
        "token of the global batch. Student and teacher run without dropout."
    )
    metrics = ("divergence_loss", "label_loss", "perplexity", "accuracy", "loss")
    reads_as = ("causal_lm",)
    uses_dropout = False

    def find_problems(self, args: Settings) -> Iterator[str]:
        if args.teacher is None:
            yield (
                "--task distillation needs --teacher MODEL: a model with the student's "
                "vocabulary, as a Hub name, a folder or a run. Without one, use --task causal_lm."
            )
            return
        try:
            check_folder(_find_place(args.teacher), needed="config.json", needs_weights=True)
        except ModelError as error:
            yield f"--teacher {args.teacher}: {error}"

    def prepare(self, args: Settings, splits: Mapping[str, Any] | None = None) -> PreparedData:
        if args.teacher is not None:
            _check_vocabulary(args)
        prepared = super().prepare(args, splits)
        return replace(prepared, extras={**prepared.extras, "objective": _build_objective(args)})

    def build_objective(self, args: Settings) -> Objective:
        raise_problems(list(self.find_problems(args)))
        return _build_objective(args)

    def build_frozen_models(self, args: Settings, prepared: PreparedData) -> dict[str, FrozenModel]:
        import torch

        layout: dict[str, Any] = _SHARDED if args.shard_teacher else {}
        if args.pipeline_model_parallel_size > 1:
            layout = _WHOLE  # only the last stage asks it, while the others are busy
        theirs = _get_teacher_settings(args).replace("the teacher", **layout)
        if theirs.from_scratch:  # of a verification, whose runs may have drawn different numbers
            torch.manual_seed(theirs.seed + 1)
        teacher = super().build_model(theirs, replace(prepared, model_settings={}))
        size = sum(parameter.numel() for parameter in teacher.parameters())
        where = ", whole on every rank" if layout is _WHOLE else ", sharded" if layout else ""
        get_logger().info(
            "teacher   %s: %s parameters%s%s", args.teacher, f"{size:,}", where,
            "" if args.teacher_precision is None else f", in {args.teacher_precision}",
        )  # fmt: skip
        return {"teacher": FrozenModel(teacher, args.teacher_precision, layout)}

    def score(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
        """The records of plain language models, with the divergence and the loss of both."""
        import torch

        from rapidformer.objectives.reference import ask
        from rapidformer.tasks.evaluation.scoring import shift_labels
        from rapidformer.tasks.text.text import score_blocks

        objective, context = prepared.extras["objective"], prepared.extras["context"]
        inputs, labels = self.drop_labels(batch), batch["labels"]

        def get_logits(model: Any) -> torch.Tensor:
            return model(**objective.get_inputs(model, inputs)).logits

        student, teacher = get_logits(model), ask(context, "teacher", get_logits)
        records = score_blocks(student, shift_labels(labels))
        # One row at a time: the whole batch in fp32 would double the largest tensors.
        rows = zip(student, teacher, labels, strict=True)
        sums = [objective.sum(*(part[None] for part in row)).divergence for row in rows]
        weight = objective.alpha * objective.temperature**2
        return [
            {
                "loss": weight * divergence + (1 - objective.alpha) * record["loss"],
                "count": (count := record["count"]),
                "by_token": {
                    "divergence_loss": (divergence, count), "label_loss": (record["loss"], count),
                    **record["by_token"],
                },
            }
            for record, divergence in zip(records, torch.stack(sums).tolist(), strict=True)
        ]  # fmt: skip


def _build_objective(args: DistillationArguments) -> Objective:
    from rapidformer.objectives.distillation import Distillation
    from rapidformer.tasks.text.packed_attention import get_inputs

    return Distillation(
        beta=_BETAS.get(args.divergence, args.distillation_beta),
        temperature=args.distillation_temperature, alpha=args.distillation_alpha,
        get_inputs=get_inputs,  # type: ignore[arg-type]
    )  # fmt: skip


# ---- the teacher ---------------------------------------------------------------------------------


def _find_place(teacher: str) -> str:
    return str(find_model_folder(Path(teacher).expanduser()) or teacher)


def _get_teacher_settings(args: Settings) -> Settings:
    """The settings that build the teacher."""
    changed = {**_STUDENTS, "pretrained_model_name_or_path": _find_place(args.teacher or "")}
    if args.sources.get("from_scratch") == "rapidformer verify":
        for name in _SIZES:  # the student was made small, and so is the teacher
            changed.pop(name)
    return args.replace("the teacher", **changed)


def _check_vocabulary(args: Settings) -> None:
    """Refuse a teacher for whom the student's ids mean other tokens."""
    from rapidformer.models.build import load_tokenizer
    from rapidformer.models.configuration import load_config

    theirs, ours = _get_teacher_settings(args), load_tokenizer(args).get_vocab()
    try:
        taught = load_tokenizer(theirs).get_vocab()
        size = getattr(load_config(theirs), "vocab_size", None)
    except ModelError as error:
        raise ModelError(f"--teacher {args.teacher}: {error}") from None
    names, others = ({number: token for token, number in v.items()} for v in (ours, taught))
    shared = range(min(max(names, default=0), max(others, default=0)) + 1)
    number = next((n for n in shared if names.get(n) != others.get(n)), None)
    student = get_model_location(args) or "the student"
    if number is not None:
        raise ModelError(
            f"--teacher {args.teacher} has another vocabulary than {student}: token {number} is "
            f"{others.get(number)!r} there and {names.get(number)!r} here. Distributions can only "
            "be compared token by token: choose a teacher with the student's tokenizer."
        )
    if size is not None and max(names, default=0) >= size:
        raise ModelError(
            f"--teacher {args.teacher} knows {size} tokens, and the tokenizer of {student} has "
            f"ids up to {max(names)}: choose a teacher that knows them all."
        )
