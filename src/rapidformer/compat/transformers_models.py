"""transformers' models: which attention they use, and how they can be split."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from typing import Any

from rapidformer.compat.patches import Entry, Patch, describe_difference

PRIVATE_NAMES = {
    "transformers.PreTrainedConfig._attn_implementation": "which attention a model uses",
    "transformers.PreTrainedConfig._attn_implementation_internal": "context parallelism",
    "transformers.PreTrainedConfig._experts_implementation": "which experts a mixture uses",
    "transformers.PreTrainedConfig._experts_implementation_internal": "compiled experts",
    "transformers.models.mixtral.modeling_mixtral.MixtralExperts._apply_gate": "compiled experts",
    "transformers.models.falcon.modeling_falcon.FalconAttention._split_heads": "slicing heads",
    "transformers.PreTrainedModel._can_set_attn_implementation": "context parallelism",
    "transformers.AttentionInterface._global_mapping": "attention functions of ours",
    "transformers.AttentionMaskInterface._global_mapping": "masks for them",
    "transformers.integrations.moe.ExpertsInterface._global_mapping": "compiled experts",
    "transformers.PreTrainedModel._supports_flex_attn": "choosing an attention",
    "transformers.PreTrainedModel._tp_plan": "tensor parallelism of transformers' models",
    "transformers.PreTrainedModel._can_compile_fullgraph": "generating with CUDA graphs",
    "transformers.PreTrainedModel._ep_plan": "expert parallelism of transformers' models",
    "transformers.utils.output_capturing._active_collector": "outputs of replayed blocks",
}


_CAPTURING = "transformers.utils.output_capturing"


def find_captured(hook: Any) -> str | None:
    """Which output transformers keeps with this hook, if a call asks for it; None: another hook."""
    if getattr(hook, "__module__", None) != _CAPTURING or "key" not in hook.__code__.co_freevars:
        return None
    cell = hook.__closure__[hook.__code__.co_freevars.index("key")]
    return str(cell.cell_contents)


def list_captured() -> frozenset[str]:
    """Which outputs of its modules the model that runs now keeps, such as ``hidden_states``."""
    module = sys.modules.get(_CAPTURING)
    return frozenset() if module is None else frozenset(module._active_collector.get() or ())


SPLIT_HEADS = "_split_heads"
"""Falcon's method that takes queries, keys and values from one product."""


def is_falcon_attention(cls: type) -> bool:
    """Whether a class is Falcon's attention, and splits heads itself."""
    is_falcon = get_own_name(cls) == "transformers.models.falcon.modeling_falcon.FalconAttention"
    return is_falcon and hasattr(cls, SPLIT_HEADS)


_DEBERTAS = ("transformers.models.deberta.modeling_deberta.",
             "transformers.models.deberta_v2.modeling_deberta_v2.")  # fmt: skip


def is_disentangled_attention(cls: type) -> bool:
    """Whether a class is DeBERTa's attention, of either version."""
    return get_own_name(cls) in [f"{module}DisentangledSelfAttention" for module in _DEBERTAS]


def is_disentangled_classifier(cls: type) -> bool:
    """Whether a class is DeBERTa with a label per row, of either version."""
    is_its_own = get_own_name(cls).startswith(_DEBERTAS)
    return is_its_own and cls.__name__.endswith("ForSequenceClassification")


def find_unknown_disentangled(cls: type) -> str | None:
    """How this class of DeBERTa's attention differs from what we know; None if it does not."""
    takes = [
        "self", "hidden_states", "attention_mask", "output_attentions", "query_states",
        "relative_pos", "rel_embeddings",
    ]  # fmt: skip
    return describe_difference("transformers", cls, "forward", takes)


_UNLIKE_OTHERS = {"VitsAttention"}
"""Classes that use the same dropped-out weights twice."""


@functools.cache
def has_own_attention_code(cls: type) -> bool:
    """Whether a class of transformers computes attention without its attention functions.

    By its name, and by what its methods call: a softmax, and a product of matrices.
    """
    is_model = any(base.__name__ == "PreTrainedModel" for base in cls.__mro__)
    is_own = cls.__module__.startswith("transformers.models.")
    is_attention = "Attention" in cls.__name__ or "Attn" in cls.__name__
    is_fused = "Sdpa" in cls.__name__ or "Flash" in cls.__name__
    if is_model or not is_own or not is_attention or is_fused or cls.__name__ in _UNLIKE_OTHERS:
        return False
    names = {name for code in _list_codes(cls) for name in code.co_names}
    multiplies = names & {"matmul", "bmm", "baddbmm", "einsum"} or "@" in _list_operators(cls)
    is_eager = bool(names & {"softmax", "Softmax"}) and bool(multiplies)
    return is_eager and "ALL_ATTENTION_FUNCTIONS" not in names


@functools.cache
def changes_in_place(cls: type) -> bool:
    """Whether the code of a class has a ``+=`` or the like."""
    return any(operator.endswith("=") for operator in _list_operators(cls))


def _list_operators(cls: type) -> set[str]:
    steps = (step for code in _list_codes(cls) for step in dis.get_instructions(code))
    return {step.argrepr for step in steps if step.opname == "BINARY_OP"}


def _list_codes(cls: type) -> list[Any]:
    """The code of a class's methods, those of its bases in the same file included."""
    bases = [base for base in cls.__mro__ if base.__module__ == cls.__module__]
    members = [member for base in bases for member in vars(base).values() if callable(member)]
    functions = [inspect.unwrap(member) for member in members]
    return [each.__code__ for each in functions if inspect.isfunction(each)]


def is_conv1d(cls: type) -> bool:
    """Whether a class is GPT-2's ``Conv1D``: a linear layer with a transposed weight."""
    return get_own_name(cls) == "transformers.pytorch_utils.Conv1D"


def is_silu(cls: type) -> bool:
    """Whether a class is torch's or transformers' SiLU."""
    known = ("torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation")
    return get_own_name(cls) in known


def get_own_name(cls: type) -> str:
    """To know a class by: models without transformers must not import it."""
    return f"{cls.__module__}.{cls.__name__}"


def is_model(target: Any) -> bool:
    """Whether an object is a model of transformers, or of a class derived from one (by name)."""
    return any(base.__name__ == "PreTrainedModel" for base in type(target).__mro__)


def is_own_model(cls: type) -> bool:
    """Whether a class is a model of transformers, not one derived from it (by name, as above)."""
    is_model = any(base.__name__ == "PreTrainedModel" for base in cls.__mro__)
    return is_model and cls.__module__.startswith("transformers.models.")


def chooses_attention(config: Any) -> bool:
    """Whether a configuration says which attention a model uses."""
    return hasattr(config, "_attn_implementation_internal")


def get_attention(config: Any) -> str:
    """The name of the attention that a configuration selects."""
    return str(config._attn_implementation)


def set_attention(config: Any, name: str) -> None:
    """Select an attention registered under a name of ours, unchecked."""
    config._attn_implementation_internal = name


def get_attention_table() -> dict[str, Any]:
    """transformers' attention functions by name, which all models share."""
    from transformers import AttentionInterface

    return AttentionInterface._global_mapping


def find_unknown_attention() -> str | None:
    """How transformers' attention by torch differs from the one we know; None if it does not."""
    from transformers.integrations import sdpa_attention

    older = [
        "module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal",
        "position_bias", "kwargs",
    ]  # fmt: skip
    newer = [*older[:-1], "cache", "kwargs"]  # a paged cache, which only generation passes
    differences = [
        describe_difference("transformers", sdpa_attention, "sdpa_attention_forward", takes)
        for takes in (newer, older)
    ]
    return None if None in differences else differences[0]


def get_mask_table() -> dict[str, Any]:
    """The functions that make their masks."""
    from transformers import AttentionMaskInterface

    return AttentionMaskInterface._global_mapping


def get_expert_table() -> dict[str, Any]:
    """transformers' ways to compute experts, by name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS._global_mapping


def get_experts(config: Any) -> str | None:
    """The name of the way in which a mixture computes its experts, if it has any."""
    name = getattr(config, "_experts_implementation", None)
    return None if name is None else str(name)


def set_experts(config: Any, name: str) -> None:
    """Select a way registered under a name of ours, unchecked."""
    config._experts_implementation_internal = name


def apply_expert_gate(experts: Any, projected: Any) -> Any:
    """Gate and input of every expert's feed-forward layer -> what is projected down."""
    return experts._apply_gate(projected)


def has_fixed_attention(model: Any) -> bool:
    """Whether a model computes attention in its own code, bypassing transformers' interface."""
    can_set = getattr(model, "_can_set_attn_implementation", None)
    return callable(can_set) and not can_set()


def supports_flex_attention(model: Any) -> bool:
    """Whether transformers says that a model runs with FlexAttention."""
    return bool(getattr(model, "_supports_flex_attn", False))


def get_tensor_plan(model: Any) -> dict[str, str]:
    """How transformers would split a model's layers, by name pattern; empty if it has no plan."""
    return getattr(model, "_tp_plan", None) or {}


def get_expert_plan(model: Any) -> dict[str, str]:
    """The same for its experts."""
    return getattr(model, "_ep_plan", None) or {}


def takes_static_cache(model: Any, own_class: type) -> bool:
    """Whether a model may generate with a cache of one size that never waits for the device."""
    config: Any = getattr(model, "config", None)
    is_decoder = is_own_model(own_class) and hasattr(model, "generate")
    if not is_decoder or config.is_encoder_decoder or not model._can_compile_fullgraph:
        return False
    from transformers import StaticCache

    layers = StaticCache(config=config.get_text_config(decoder=True), max_cache_len=8).layers
    known = "transformers.cache_utils.StaticLayer"
    return all(get_own_name(type(layer)) == known for layer in layers)


def find_cached_tensors(cache: Any) -> list[Any]:
    """The keys and values of a static cache that is in use; none of any other."""
    if get_own_name(type(cache)) != "transformers.cache_utils.StaticCache":
        return []
    layers = [layer for layer in cache.layers if layer.is_initialized]
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def find_cached_lengths(cache: Any) -> list[Any]:
    """How many tokens each layer of a static cache has, as tensors that it changes in place."""
    return [layer.cumulative_length for layer in cache.layers if layer.is_initialized]


def _list_cache_updates() -> list[Entry]:
    from transformers.cache_utils import StaticLayer

    return [Entry(StaticLayer, "update", _cast_states)]


def _cast_states(before: Any) -> Any:
    import torch

    def update(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        kind = keys.device.type
        if ONE_DTYPE.is_inside() and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            keys, values = keys.to(dtype), values.to(dtype)
        return before(self, keys, values, *args, **kwargs)

    return update


ONE_DTYPE = Patch(_list_cache_updates)
"""Inside, a static cache takes keys in fp32 and values in bf16, as they are under autocast: both in
16 bits, in which attention computes with them anyway."""
