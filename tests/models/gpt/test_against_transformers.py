"""With another family's weights copied in, the numbers are that family's."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rapidformer.models import GPTModel

from .small import MODERN, VOCABULARY, make_config, make_tokens

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def test_gpt2() -> None:
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=32,
            initializer_range=0.1,
        )
    ).eval()  # fmt: skip
    _disturb(theirs)
    ours = GPTModel(make_config(num_layers=3, ffn_hidden_size=None)).eval()
    weights = {
        "word_embeddings": theirs.transformer.wte,
        "position_embeddings": theirs.transformer.wpe,
        "final_norm": theirs.transformer.ln_f,
    }
    for i, block in enumerate(theirs.transformer.h):
        joint = _turn(block.attn.c_attn)
        for part, name in enumerate(("query", "key", "value")):
            weights[f"layers.{i}.attention.{name}"] = {
                key: tensor.chunk(3)[part] for key, tensor in joint.items()
            }
        weights[f"layers.{i}.attention.output"] = _turn(block.attn.c_proj)
        weights[f"layers.{i}.attention_norm"] = block.ln_1
        weights[f"layers.{i}.feed_forward_norm"] = block.ln_2
        weights[f"layers.{i}.feed_forward.up"] = _turn(block.mlp.c_fc)
        weights[f"layers.{i}.feed_forward.down"] = _turn(block.mlp.c_proj)
    _copy(weights, ours)
    tokens = make_tokens(length=24)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, **TOLERANCE)


def test_llama() -> None:
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**_llama_sizes())).eval()
    _disturb(theirs)
    ours = GPTModel(make_config(**MODERN, rotary_base=5000.0)).eval()
    _copy(_name_llama(theirs), ours)
    tokens = make_tokens(length=24)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, **TOLERANCE)


def test_mixtral_and_its_balance_loss() -> None:
    torch.manual_seed(0)
    theirs = MixtralForCausalLM(
        MixtralConfig(**_llama_sizes(), num_local_experts=4, num_experts_per_tok=2)
    ).eval()
    _disturb(theirs)
    ours = GPTModel(make_config(**MODERN, rotary_base=5000.0, num_experts=4)).eval()
    weights = _name_llama(theirs)
    for i, layer in enumerate(theirs.model.layers):
        gate, up = layer.mlp.experts.gate_up_proj.transpose(1, 2).chunk(2, dim=-1)
        down = layer.mlp.experts.down_proj.transpose(1, 2)
        weights[f"layers.{i}.feed_forward.experts"] = {"gate": gate, "up": up, "down": down}
        weights[f"layers.{i}.feed_forward.router"] = layer.mlp.gate
    _copy(weights, ours)
    tokens = make_tokens(length=24)
    output = theirs(tokens, output_router_logits=True)
    torch.testing.assert_close(ours(tokens), output.logits, **TOLERANCE)
    _, *moe_losses = ours(tokens, labels=tokens)
    for loss, router_logits in zip(moe_losses, output.router_logits, strict=True):
        # Theirs counts each of a token's two choices as a whole: twice ours.
        expected = load_balancing_loss_func((router_logits,), 4, 2) / 2
        torch.testing.assert_close(loss, expected)


def _llama_sizes() -> dict[str, object]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }  # fmt: skip


def _name_llama(theirs: nn.Module) -> dict[str, object]:
    weights = {
        "word_embeddings": theirs.model.embed_tokens,
        "final_norm": theirs.model.norm,
        "output": theirs.lm_head,
    }
    for i, layer in enumerate(theirs.model.layers):
        attention = layer.self_attn
        for name, theirs_name in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
            weights[f"layers.{i}.attention.{name}"] = getattr(attention, f"{theirs_name}_proj")
        weights[f"layers.{i}.attention_norm"] = layer.input_layernorm
        weights[f"layers.{i}.feed_forward_norm"] = layer.post_attention_layernorm
        for name in ("gate", "up", "down"):
            if hasattr(layer.mlp, f"{name}_proj"):
                weights[f"layers.{i}.feed_forward.{name}"] = getattr(layer.mlp, f"{name}_proj")
    return weights


def _turn(linear: nn.Module) -> dict[str, torch.Tensor]:
    """GPT-2 keeps its matrices the other way round."""
    return {"weight": linear.weight.T, "bias": linear.bias}


def _disturb(model: nn.Module) -> None:
    """Fresh norms are ones and fresh biases zeros: such weights would hide a mix-up."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)


def _copy(weights: dict[str, object], model: GPTModel) -> None:
    """Every parameter of the model gets a weight, and every weight finds its parameter."""
    filled = set()
    with torch.no_grad():
        for name, source in weights.items():
            tensors = dict(source.named_parameters()) if isinstance(source, nn.Module) else source
            for key, tensor in tensors.items():
                model.get_parameter(f"{name}.{key}").copy_(tensor)
                filled.add(f"{name}.{key}")
    assert filled == {name for name, _ in model.named_parameters()}
