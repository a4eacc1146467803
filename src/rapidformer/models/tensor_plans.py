"""How the layers of a model may be split over processes: the tensor-parallel plan.

Sources in order: the model's own ``rapidformer_plan()``, Hugging Face's plan (of which only the
words are taken), our table for families without one. Patterns name modules; ``*`` stands for one
part of a dotted name. What a reader would get wrong: a plan says nothing of parameters it does not
name; those are kept whole on every process.

Styles:
  colwise                         each process computes its share of the outputs (whole heads)
  rowwise                         each has its share of the inputs; the outputs are summed
  colwise_gather_output           as colwise, then joined
  rowwise_split_input             as rowwise, from a whole input
  embedding_rowwise               each process has its part of the vocabulary
  key_value                       colwise over key/value heads, of which there may be too few
  fused_qkv, fused_kv             colwise, of two or three matrices side by side
  replicated_with_grad_allreduce  whole, but used on a share of the heads only
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rapidformer.errors import ModelError
from rapidformer.models.plan import ModelPlan

STYLES = (
    "colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "embedding_rowwise",
    "key_value", "fused_qkv", "fused_kv", "replicated_with_grad_allreduce",
)  # fmt: skip
# Styles after which the outputs are a share: what may stand inside a split sequence.
_SEQUENCE_STYLES = {
    "colwise",
    "rowwise",
    "key_value",
    "fused_qkv",
    "replicated_with_grad_allreduce",
}
_KEY_VALUE_NAMES = ("k_proj", "v_proj")
_EXPERTS = "moe_tp_experts"


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The plan of one model, with every pattern resolved to modules."""

    styles: Mapping[str, str]
    """Module name to style."""
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Module name to attributes that count heads."""
    sequence_problem: str = ""
    """Why the tokens between its layers cannot be split; empty where they can."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class _Family:
    """An entry of the table; names are relative to the family's base model."""

    tensor: Mapping[str, str]
    divided: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sequence_problem: str = ""


_BERT = _Family(
    tensor={
        "embeddings.word_embeddings": "embedding_rowwise",
        **{
            f"encoder.layer.*.{attention}.{layer}": style
            for attention in ("attention", "crossattention")
            for layer, style in (
                ("self.query", "colwise"),
                ("self.key", "colwise"),
                ("self.value", "colwise"),
                ("output.dense", "rowwise"),
            )
        },
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    }
)
_GPT2 = _Family(
    tensor={
        "wte": "embedding_rowwise",
        "h.*.attn.c_attn": "fused_qkv",
        "h.*.attn.c_proj": "rowwise",
        "h.*.crossattention.q_attn": "colwise",
        "h.*.crossattention.c_attn": "fused_kv",
        "h.*.crossattention.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    # The width at which the fused output is taken apart again.
    divided={"h.*.attn": ("split_size",), "h.*.crossattention": ("split_size",)},
)
_T5 = _Family(
    tensor={
        "shared": "embedding_rowwise",
        "*.embed_tokens": "embedding_rowwise",
        **{
            f"*.block.*.layer.*.{attention}.{layer}": style
            for attention in ("SelfAttention", "EncDecAttention")
            for layer, style in (
                ("q", "colwise"),
                ("k", "colwise"),
                ("v", "colwise"),
                ("o", "rowwise"),
                ("relative_attention_bias", "colwise"),
            )
        },
        "*.block.*.layer.*.DenseReluDense.wi": "colwise",
        "*.block.*.layer.*.DenseReluDense.wi_0": "colwise",
        "*.block.*.layer.*.DenseReluDense.wi_1": "colwise",
        "*.block.*.layer.*.DenseReluDense.wo": "rowwise",
    },
    divided={
        "*.block.*.layer.*.SelfAttention": ("n_heads",),
        "*.block.*.layer.*.EncDecAttention": ("n_heads",),
    },
    sequence_problem="its decoder looks at the encoder's output, whose tokens are whole.",
)
_VIT = _Family(
    tensor={
        "layers.*.attention.q_proj": "colwise",
        "layers.*.attention.k_proj": "colwise",
        "layers.*.attention.v_proj": "colwise",
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
    }
)
_FAMILIES = {"bert": _BERT, "roberta": _BERT, "gpt2": _GPT2, "t5": _T5, "vit": _VIT}


def find_tensor_plan(model: nn.Module, plan: ModelPlan) -> TensorPlan:
    """The plan from the best source that knows the model; an error that says what is missing."""
    if plan.tensor:
        patterns, divided = dict(plan.tensor), plan.divided
        source = plan.source
        is_allowed = plan.has_split_sequences
        problem = "" if is_allowed else f"{source} does not say has_split_sequences."
    elif getattr(model, "_tp_plan", None):
        patterns, divided = _read_hugging_face(model), {}
        source = "transformers' plan of the model"
        problem = _find_sequence_problem(patterns)
    else:
        family = _FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
        if family is None:
            raise ModelError(_explain_missing(model))
        prefix = _find_base_prefix(model)
        patterns = {prefix + pattern: style for pattern, style in family.tensor.items()}
        divided = {prefix + pattern: names for pattern, names in family.divided.items()}
        source, problem = "our table", family.sequence_problem
    styles = dict(expand_patterns(model, patterns))
    _check_styles(model, styles)
    if not styles:
        raise ModelError(_explain_missing(model))
    if hasattr(model, "get_output_embeddings"):
        styles = {**_find_vocabulary(model), **styles}
    return TensorPlan(
        styles=styles,
        divided={name: tuple(names) for name, names in expand_patterns(model, divided)},
        sequence_problem=problem,
        source=source,
    )


def describe_model(model: nn.Module) -> str:
    """The name a user knows the model by."""
    name = getattr(getattr(model, "config", None), "name_or_path", "")
    return str(name or type(model).__name__)


def _read_hugging_face(model: Any) -> dict[str, str]:
    # Experts stay whole on every process: to split them is expert parallelism's business.
    patterns = {name: style for name, style in model._tp_plan.items() if style != _EXPERTS}
    for pattern, style in patterns.items():
        if style == "colwise" and pattern.rpartition(".")[2] in _KEY_VALUE_NAMES:
            patterns[pattern] = "key_value"
    return patterns


def _find_sequence_problem(patterns: Mapping[str, str]) -> str:
    inside = {style for name, style in patterns.items() if ".layers.*." in f".{name}"}
    others = ", ".join(sorted(inside - _SEQUENCE_STYLES))
    return f"transformers' plan keeps some of its layers together ({others})." if others else ""


def _find_vocabulary(model: Any) -> dict[str, str]:
    """The embedding and the head, which plans often leave out: they are large."""
    found: dict[str, str] = {}
    names = {id(module): name for name, module in model.named_modules()}
    for module, kind, style in (
        (model.get_input_embeddings(), nn.Embedding, "embedding_rowwise"),
        (model.get_output_embeddings(), nn.Linear, "colwise_gather_output"),
    ):
        if isinstance(module, kind) and id(module) in names:
            found[names[id(module)]] = style
    return found


def _find_base_prefix(model: Any) -> str:
    """Where the family's base model stands inside a model with a head: ``bert.``"""
    base = model.base_model
    return next(f"{n}." if n else "" for n, module in model.named_modules() if module is base)


def expand_patterns(model: nn.Module, patterns: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Patterns to modules; a pattern that meets no module is none of this model's business."""
    compiled = [
        (re.compile(re.escape(pattern).replace(r"\*", "[^.]+")), value)
        for pattern, value in patterns.items()
    ]
    for name, _ in model.named_modules(remove_duplicate=False):
        for pattern, value in compiled:
            if pattern.fullmatch(name):
                yield name, value


def _check_styles(model: nn.Module, styles: Mapping[str, str]) -> None:
    unknown = {style: name for name, style in styles.items() if style not in STYLES}
    if unknown:
        shown = ", ".join(f"{style} ({name})" for style, name in unknown.items())
        raise ModelError(
            f"--tensor-model-parallel-size: the plan of {describe_model(model)} has styles that "
            f"cannot be split here: {shown}. Known are {', '.join(STYLES)}. "
            "--zero-3-memory-optimization splits any model over the processes."
        )


def _explain_missing(model: nn.Module) -> str:
    return (
        f"--tensor-model-parallel-size: nothing says how {describe_model(model)} may be split. "
        f"Give {type(model).__name__} a method rapidformer_plan() that returns "
        "{'blocks': 'name.of.list', 'tensor': {'layers.*.query': 'colwise', "
        "'layers.*.output': 'rowwise', ...}}, or use --zero-3-memory-optimization, which needs no "
        "plan."
    )
