"""How a model's layers may be split over ranks: the tensor-parallel plan.

Sources in order: the caller, the model's own ``rapidformer_plan()``, Hugging Face's plan (only its
strings are used), our table for families without one. Patterns name modules, or parameters with one
number per head; ``*`` stands for one part of a dotted name. Parameters that a plan does not name
stay whole on every rank.

Styles:
  colwise                         each rank computes a slice of the outputs (whole heads)
  rowwise                         each rank takes a slice of the inputs; outputs are summed
  colwise_gather_output           as colwise, then joined
  rowwise_split_input             as rowwise, from a whole input
  embedding_rowwise               each rank has a slice of the vocabulary
  key_value                       colwise over key/value heads, of which there may be too few
  fused_qkv, fused_kv             colwise, of two or three matrices side by side
  replicated_with_grad_allreduce  whole, but applied to a slice of the heads only
  mla_kv_a_proj                   whole; some of its outputs are used on a slice of the heads only
  whole                           whole, and applied to each token separately (adapters)
  whole_fused_qkv, …_kv           whole; each rank uses its rows of each matrix (adapters)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rapidformer.compat.transformers_models import get_tensor_plan
from rapidformer.errors import ConfigurationError, ModelError, RapidformerError
from rapidformer.models.plan import ModelPlan, compile_pattern, expand_patterns

FLAG = "--tensor-model-parallel-size"
_STYLES = (
    "colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "embedding_rowwise",
    "key_value", "fused_qkv", "fused_kv", "replicated_with_grad_allreduce", "mla_kv_a_proj",
    "whole", "whole_fused_qkv", "whole_fused_kv",
)  # fmt: skip
_KEY_VALUE_NAMES = ("k_proj", "v_proj")
# Experts stay whole on every rank: splitting them is up to expert parallelism.
_EXPERT_STYLES = ("moe_tp_experts", "moe_identity_expert", "all_reduce")
# What transformers' plan of a family leaves out, although it works on a slice of the width.
_LEFT_OUT = {"apertus": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}}
_WRONG = {"doge": "its dynamic mask covers all heads, whichever heads a rank holds."}


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The plan of one model, with every pattern resolved to modules."""

    styles: Mapping[str, str]
    """Module name to style."""
    parameters: frozenset[str] = frozenset()
    """Names of parameters, not layers, that have one entry per head: split like the heads."""
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Module name to attributes that count heads."""
    sequence_problem: str = ""
    """Why the tokens between its layers cannot be split; empty if they can."""
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
        "encoder.layer.*.intermediate.dense": "colwise", "encoder.layer.*.output.dense": "rowwise",
        **{
            f"encoder.layer.*.{attention}.{layer}": style
            for attention in ("attention", "crossattention")
            for layer, style in (
                ("self.query", "colwise"), ("self.key", "colwise"), ("self.value", "colwise"),
                ("output.dense", "rowwise"),
            )
        },
    }
)  # fmt: skip
_GPT2 = _Family(
    tensor={
        "wte": "embedding_rowwise",
        "h.*.attn.c_attn": "fused_qkv", "h.*.attn.c_proj": "rowwise",
        "h.*.crossattention.q_attn": "colwise", "h.*.crossattention.c_attn": "fused_kv",
        "h.*.crossattention.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise",
    },
    # The width at which the fused output is split again.
    divided={"h.*.attn": ("split_size",), "h.*.crossattention": ("split_size",)},
)  # fmt: skip
_T5_ATTENTIONS = ("*.block.*.layer.*.SelfAttention", "*.block.*.layer.*.EncDecAttention")
_T5 = _Family(
    tensor={
        "shared": "embedding_rowwise", "*.embed_tokens": "embedding_rowwise",
        **{
            f"{attention}.{layer}": style
            for attention in _T5_ATTENTIONS
            for layer, style in (
                ("q", "colwise"), ("k", "colwise"), ("v", "colwise"), ("o", "rowwise"),
                ("relative_attention_bias", "colwise"),
            )
        },
        **{f"*.block.*.layer.*.DenseReluDense.wi{end}": "colwise" for end in ("", "_0", "_1")},
        "*.block.*.layer.*.DenseReluDense.wo": "rowwise",
    },
    divided=dict.fromkeys(_T5_ATTENTIONS, ("n_heads",)),
    sequence_problem="its decoder looks at the encoder's output, whose tokens are whole.",
)  # fmt: skip
_VIT = _Family(
    tensor={
        "layers.*.attention.q_proj": "colwise", "layers.*.attention.k_proj": "colwise",
        "layers.*.attention.v_proj": "colwise", "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.fc1": "colwise", "layers.*.mlp.fc2": "rowwise",
    }
)  # fmt: skip
_GPT_OSS = _Family(
    tensor={
        "layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.k_proj": "key_value",
        "layers.*.self_attn.v_proj": "key_value", "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.self_attn.sinks": "colwise",
    }
)  # fmt: skip
_QWEN3 = "language_model.layers.*"
# Its language model is split as transformers splits Qwen3.
_QWEN3_VL = _Family(
    tensor={
        f"{_QWEN3}.self_attn.q_proj": "colwise", f"{_QWEN3}.self_attn.k_proj": "key_value",
        f"{_QWEN3}.self_attn.v_proj": "key_value", f"{_QWEN3}.self_attn.o_proj": "rowwise",
        f"{_QWEN3}.self_attn.q_norm": "replicated_with_grad_allreduce",
        f"{_QWEN3}.self_attn.k_norm": "replicated_with_grad_allreduce",
        f"{_QWEN3}.mlp.gate_proj": "colwise", f"{_QWEN3}.mlp.up_proj": "colwise",
        f"{_QWEN3}.mlp.down_proj": "rowwise",
    }
)  # fmt: skip
_FAMILIES = {
    "bert": _BERT, "roberta": _BERT, "gpt2": _GPT2, "t5": _T5, "vit": _VIT, "gpt_oss": _GPT_OSS,
    "qwen3_vl": _QWEN3_VL,
}  # fmt: skip


def find_tensor_plan(model: nn.Module, plan: ModelPlan) -> TensorPlan:
    """The plan from the best source that knows the model; without one, an error says so."""
    vocabulary = _find_vocabulary(model) if hasattr(model, "get_output_embeddings") else {}
    divided: Mapping[str, Sequence[str]] = {}
    problem = ""
    if plan.tensor:
        patterns, divided, source = dict(plan.tensor), plan.divided, plan.source
        if not plan.has_split_sequences:
            problem = f"{source} does not say has_split_sequences."
    else:
        patterns, source = _read_hugging_face(model), "transformers'"
        if not dict(expand_patterns(model, patterns)).keys() - vocabulary.keys():
            # If transformers has no plan for the layers, it may still name the head.
            family, prefix = _find_family(model), _find_base_prefix(model)
            patterns = {prefix + pattern: style for pattern, style in family.tensor.items()}
            divided = {prefix + pattern: names for pattern, names in family.divided.items()}
            source, problem = "built in", family.sequence_problem
    styles = dict(expand_patterns(model, patterns))
    unknown = {style: name for name, style in styles.items() if style not in _STYLES}
    if unknown:
        shown = ", ".join(f"{style} ({name})" for style, name in unknown.items())
        raise ModelError(
            f"{FLAG}: the plan of {describe_model(model)} has styles that "
            f"cannot be split here: {shown}. Known are {', '.join(_STYLES)}. "
            "--zero-3-memory-optimization shards any model."
        )
    # Of layers that have adapters, the modules inside them get the style.
    spread: dict[str, str] = {}
    for name, style in {**vocabulary, **styles}.items():
        spread |= dict(_spread_style(name, model.get_submodule(name), style))
    return TensorPlan(
        styles=spread,
        parameters=_find_parameters(model, patterns),
        divided={name: tuple(names) for name, names in expand_patterns(model, divided)},
        sequence_problem=problem,
        source=source,
    )


def _find_family(model: nn.Module) -> _Family:
    family = _FAMILIES.get(_get_kind(model))
    if family is None:
        raise ModelError(
            f"{FLAG}: no plan says how {describe_model(model)} may be split. "
            "Say it by engine.compose(model, plan={'blocks': 'name.of.list', 'tensor': "
            "{'layers.*.query': 'colwise', 'layers.*.output': 'rowwise', ...}}), or let a method "
            f"rapidformer_plan() of {type(model).__name__} return the same; or use "
            "--zero-3-memory-optimization, which needs no plan."
        )
    return family


def describe_other_splits(
    model: nn.Module, plan: ModelPlan, always: str = "--zero-3-memory-optimization"
) -> str:
    """What to use instead of stages: tensor parallelism is offered if it can split the model."""
    try:
        find_tensor_plan(model, plan)
    except RapidformerError:
        return always
    return f"{FLAG} or {always}"


def _get_kind(model: nn.Module) -> str:
    """transformers' name for the family."""
    return str(getattr(getattr(model, "config", None), "model_type", ""))


def describe_model(model: nn.Module) -> str:
    """The name users know the model by."""
    name = getattr(getattr(model, "config", None), "name_or_path", "")
    return str(name or type(model).__name__)


def _read_hugging_face(model: Any) -> dict[str, str]:
    kind = _get_kind(model)
    if kind in _WRONG:
        raise ModelError(
            f"{FLAG}: transformers' plan of {describe_model(model)} does not "
            f"hold: {_WRONG[kind]} --zero-3-memory-optimization splits any model over the "
            "processes."
        )
    plan = get_tensor_plan(model)
    experts = [name for name, style in plan.items() if style in _EXPERT_STYLES]
    patterns = {
        name: style
        for name, style in plan.items()
        if not any(name == expert or name.startswith(f"{expert}.") for expert in experts)
    }
    for pattern, style in patterns.items():
        if style == "colwise" and pattern.rpartition(".")[2] in _KEY_VALUE_NAMES:
            patterns[pattern] = "key_value"
    left_out = _LEFT_OUT.get(kind, {})
    return patterns | {_find_base_prefix(model) + name: style for name, style in left_out.items()}


def _find_parameters(model: nn.Module, patterns: Mapping[str, str]) -> frozenset[str]:
    """Parameters that the plan names directly rather than by their layer."""
    compiled = [(compile_pattern(pattern), style) for pattern, style in patterns.items()]
    named: set[str] = set()
    for name, parameter in model.named_parameters():
        for style in (style for pattern, style in compiled if pattern.fullmatch(name)):
            if style != "colwise" or parameter.dim() != 1:
                raise ModelError(
                    f"{FLAG}: the plan of {describe_model(model)} splits the "
                    f"parameter {name} of shape {list(parameter.shape)} as {style}: only those of "
                    "one dimension can be named themselves, as colwise. Name the layer instead."
                )
            named.add(name)
    return frozenset(named)


def _find_vocabulary(model: Any) -> dict[str, str]:
    """The embedding and the head, which plans often leave out: they are large."""
    styles: dict[str, str] = {}
    names = {id(module): name for name, module in model.named_modules()}
    for find, kind, style in (
        ("get_input_embeddings", nn.Embedding, "embedding_rowwise"),
        ("get_output_embeddings", nn.Linear, "colwise_gather_output"),
    ):
        try:
            module = getattr(model, find)()
        except NotImplementedError:  # a model of two towers, such as CLIP
            continue
        if isinstance(module, kind) and id(module) in names:
            styles[names[id(module)]] = style
    return styles


def _find_base_prefix(model: Any) -> str:
    """Where the family's base model is inside a model with a head: ``bert.``"""
    base = model.base_model
    return next(f"{n}." if n else "" for n, module in model.named_modules() if module is base)


# ---- layers with adapters ------------------------------------------------------------------------
#
# A LoRA layer computes W x + B (A x). If W is split by outputs, so is B, and A stays whole; if W is
# split by inputs, so is A, and B stays whole. The narrow product A x is whole on every rank.

_INNER = ("base_layer", "original_module", "modules_to_save", "lora_A", "lora_B")
# Styles that split a layer's inputs; all others split its outputs, or nothing.
BY_INPUTS = ("rowwise", "rowwise_split_input")
# A strided slice of the first dimension would be sharded in the wrong order: B is small, so it
# stays whole, and each rank reads its own rows.
_STYLES_OF_B = {"fused_qkv": "whole_fused_qkv", "fused_kv": "whole_fused_kv"}


def get_layer_name(name: str) -> str:
    """The name of the layer that a module is a part of: ``q_proj`` for ``q_proj.lora_B.default``"""
    parts = name.split(".")
    inner = [i for i, part in enumerate(parts) if part in _INNER]
    return ".".join(parts[: inner[0]]) if inner else name


def find_unsplittable(model: nn.Module) -> Iterator[str]:
    """Adapters that replace a parameter while its module runs; a slice cannot be replaced."""
    for name, module in model.named_modules():
        if has_adapter(module) and type(module).__name__ == "ParamWrapper":
            yield (
                f"{FLAG} cannot split the adapter of {name}, which changes a parameter instead of "
                "a layer (a router or experts): leave it out of --lora-target-modules or "
                "target_parameters, or use --zero-3-memory-optimization instead."
            )


def has_adapter(module: nn.Module) -> bool:
    """Whether a layer is one of peft's, with the model's own layer inside."""
    # By attributes: a run without adapters must not import peft.
    return hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names")


def _spread_style(name: str, module: Any, style: str) -> Iterator[tuple[str, str]]:
    if hasattr(module, "original_module") and hasattr(module, "modules_to_save"):
        yield f"{name}.original_module", style
        for key in module.modules_to_save:
            yield f"{name}.modules_to_save.{key}", style
        return
    if not has_adapter(module):
        yield name, style
        return
    _refuse_unknown(name, module, style)
    yield f"{name}.base_layer", style
    if style == "replicated_with_grad_allreduce":
        of_a = of_b = style
    else:
        of_a = style if style in BY_INPUTS else "whole"
        of_b = "whole" if style in BY_INPUTS else _STYLES_OF_B.get(style, style)
    for key in module.lora_A:
        yield f"{name}.lora_A.{key}", of_a
        yield f"{name}.lora_B.{key}", of_b


def _refuse_unknown(name: str, module: Any, style: str) -> None:
    """Refuse what only plain LoRA can do: its two factors are the whole adapter."""
    kind = type(module).__module__.split(".")[-2].upper()
    variants = getattr(module, "lora_variant", {})
    if kind != "LORA" or variants:
        what = "DoRA" if "Dora" in str(variants) else kind
        raise ConfigurationError(
            f"{FLAG} cannot split the {what} adapter of {name}: use plain LoRA (--lora-rank "
            "without --use-dora), or --zero-3-memory-optimization instead."
        )
    padding = getattr(module.base_layer, "padding_idx", None)
    if style == "embedding_rowwise" and padding is not None:
        raise ConfigurationError(
            f"{FLAG} cannot split the adapter of the embedding {name}, which has a padding row: "
            "leave it out of --lora-target-modules, or use --zero-3-memory-optimization instead."
        )
