"""The model's arithmetic, against torch's own counter of executed operations."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForTokenClassification,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    JambaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3_5TextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from rapidformer.models.gpt import GPTConfig, GPTModel
from rapidformer.models.work import _read_window, count_work

ROWS, LENGTH, TARGETS = 2, 12, 5
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48,
}  # fmt: skip


def build(name: str) -> nn.Module:
    if name == "bert":
        return BertForTokenClassification(BertConfig(**SIZES, attn_implementation="eager"))
    if name == "t5":
        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=50,
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
            )
        )
    config = LlamaConfig(**SIZES, tie_word_embeddings=True, attn_implementation="eager")
    return LlamaForCausalLM(config)


def count_executed(model: nn.Module, targets: int = LENGTH) -> int:
    rows = torch.randint(0, 50, (ROWS, LENGTH))
    labels = rows[:, :targets] % 2
    with FlopCounterMode(display=False) as counter:
        model(input_ids=rows, labels=labels).loss.backward()
    return counter.get_total_flops()


def test_an_encoder_is_counted_exactly() -> None:
    model = build("bert")
    counted = count_work(model).count(tokens=ROWS * LENGTH, targets=0, rows=ROWS)
    assert counted == count_executed(model)


def test_causal_attention_counts_half() -> None:
    """The eager form multiplies everything and masks half of it."""
    model, work = build("llama"), count_work(build("llama"))
    tokens = ROWS * LENGTH
    masked = work.per_pair * tokens * LENGTH / 2
    counted = work.count(tokens=tokens, targets=0, rows=ROWS)
    # The rest is the rotary embedding's table.
    assert counted + masked == pytest.approx(count_executed(model), rel=1e-4)
    assert work.weights == sum(p.numel() for p in model.parameters() if p.dim() == 2)


def test_blocks_may_have_heads_of_different_sizes() -> None:
    config = Gemma4TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, global_head_dim=16,
        hidden_size_per_layer_input=4, vocab_size_per_layer_input=50,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    assert count_work(Gemma4ForCausalLM(config)).per_pair == 12 * 4 * (8 + 16)


def test_only_layers_with_attention_have_pairs_of_tokens() -> None:
    """The others, of a hybrid model, scan or convolve."""
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    for config in (
        Qwen3_5TextConfig(**SIZES, **kinds, head_dim=8),
        JambaConfig(**SIZES, attn_layer_period=2, attn_layer_offset=1),
    ):
        with torch.device("meta"):
            work = count_work(AutoModelForCausalLM.from_config(config))
        assert work.per_pair == 12 * 1 * 4 * 8


def test_a_window_of_some_layers_limits_those() -> None:
    config = GptOssConfig(**SIZES, head_dim=8, sliding_window=3)
    with torch.device("meta"):
        work = count_work(GptOssForCausalLM(config))
    tokens = ROWS * LENGTH
    pairs = work.count(tokens=tokens, targets=0, rows=ROWS) - work.per_token * tokens
    assert pairs == pytest.approx(12 * 4 * 8 * tokens * (3 + LENGTH) / 2)


def test_an_encoder_decoder_counts_sources_and_targets() -> None:
    model = build("t5")
    counted = count_work(model).count(tokens=ROWS * LENGTH, targets=ROWS * TARGETS, rows=ROWS)
    # The keys and values of the cross attention are counted with the targets.
    assert counted == pytest.approx(count_executed(model, TARGETS), rel=0.1)


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    whole = count_work(build("llama"))
    adapted = get_peft_model(build("llama"), LoraConfig(r=1, target_modules=["q_proj"]))  # type: ignore[arg-type]
    work = count_work(adapted.get_base_model())
    assert work.per_token == pytest.approx(whole.per_token * 4 / 6, rel=0.02)


def test_only_the_experts_in_use_count() -> None:
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 4}
    few = count_work(MixtralForCausalLM(MixtralConfig(**sizes)))
    more = count_work(MixtralForCausalLM(MixtralConfig(**{**sizes, "num_experts_per_tok": 4})))
    experts = 2 * 4 * 3 * 32 * 48  # layers, experts, matrices
    assert more.weights - few.weights == experts * 3 // 4


def test_our_own_model_is_causal() -> None:
    config = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64)
    work = count_work(GPTModel(config))
    assert work.is_causal
    assert work.describe().endswith("384 x tokens per row")


def test_a_model_without_sizes_has_its_products_only() -> None:
    work = count_work(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.LayerNorm(8)))
    assert work.count(tokens=10, targets=0, rows=2) == 6 * 32 * 10
    assert work.describe() == "6 x 32 weights per token"


def test_blocks_with_windows_of_their_own() -> None:
    """transformers raises if it is asked for the one window of blocks that differ."""

    class Varied:
        @property
        def sliding_window(self) -> int:
            raise RuntimeError("'sliding_window' is a per-layer attribute")

    assert _read_window(Varied()) is None
