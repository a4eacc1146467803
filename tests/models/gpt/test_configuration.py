"""From flags to a configuration, and every problem told at once."""

from __future__ import annotations

from typing import Any

import pytest

from rapidformer import context
from rapidformer.config import arguments_from_mapping
from rapidformer.errors import ConfigurationError
from rapidformer.models import GPTConfig, GPTModel
from rapidformer.models.gpt import config_from_arguments
from rapidformer.timers import Timers

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}


class _Tokenizer:
    vocab_size = 200
    eod = 199


def _run(monkeypatch: pytest.MonkeyPatch, tokenizer: Any = None, **flags: Any) -> None:
    """The current run, as an engine leaves it."""
    monkeypatch.setattr(context, "_current", context._Context())
    build = (lambda: tokenizer) if tokenizer is not None else _refuse
    args = arguments_from_mapping(flags)
    context.set_context(args=args, timers=Timers(), build_tokenizer=build)


def _refuse() -> None:
    raise ConfigurationError("there is no tokenizer: give --tokenizer-type and --vocab-file.")


def test_defaults_are_megatrons() -> None:
    config = config_from_arguments(arguments_from_mapping(SIZES), 50257)
    assert (config.vocab_size, config.tokenizer_vocab_size) == (50304, 50257)
    assert (config.ffn_hidden_size, config.max_position_embeddings) == (256, 32)
    assert (config.position_embedding_type, config.normalization) == (
        "learned_absolute",
        "LayerNorm",
    )
    assert config.num_query_groups == 4
    assert config.add_bias_linear and config.tie_word_embeddings and not config.swiglu
    assert (config.hidden_dropout, config.attention_dropout) == (0.1, 0.1)
    assert (config.init_method_std, config.layernorm_epsilon) == (0.02, 1e-5)
    assert config.num_experts is None


def test_every_flag_arrives() -> None:
    flags = {
        "num_layers": 4, "hidden_size": 96, "num_attention_heads": 6, "num_query_groups": 3,
        "ffn_hidden_size": 100, "max_position_embeddings": 77,
        "position_embedding_type": "rope", "rotary_base": 500.0, "rotary_percent": 0.5,
        "normalization": "RMSNorm", "layernorm_epsilon": 1e-6, "swiglu": True,
        "add_bias_linear": False, "hidden_dropout": 0.2, "attention_dropout": 0.3,
        "init_method_std": 0.006, "num_experts": [4, 8], "moe_layer_freq": 2,
        "moe_router_topk": 1, "moe_loss_coeff": 0.1, "moe_z_loss_coeff": 0.001,
    }  # fmt: skip
    more = {"untie_embeddings_and_output_weights": True, "make_vocab_size_divisible_by": 10}
    config = config_from_arguments(arguments_from_mapping({**flags, **more}), 101)
    assert {name: getattr(config, name) for name in flags} == flags
    assert not config.tie_word_embeddings
    assert config.vocab_size == 110


def test_the_vocabulary_is_the_same_for_any_number_of_processes() -> None:
    """Else a run on two processes would train another model than a run on one."""
    flags = arguments_from_mapping({**SIZES, "tensor_model_parallel_size": 2})
    assert config_from_arguments(flags, 257).vocab_size == 384


def test_swiglu_is_two_thirds_as_wide() -> None:
    flags = arguments_from_mapping({**SIZES, "hidden_size": 768, "swiglu": True})
    assert config_from_arguments(flags, 100).ffn_hidden_size == 2048


def test_hugging_faces_names_are_views() -> None:
    config = GPTConfig(num_hidden_layers=3, intermediate_size=50, num_attention_heads=6,
                       hidden_size=96, num_key_value_heads=2)  # fmt: skip
    assert (config.num_layers, config.ffn_hidden_size, config.num_query_groups) == (3, 50, 2)
    assert config.num_hidden_layers == 3


def test_sizes_come_from_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _run(monkeypatch, **SIZES, vocab_size=100)
    model = GPTModel()
    assert model.word_embeddings.weight.shape == (128, 64)
    assert len(model.layers) == 2
    assert model.generation_config.suppress_tokens == list(range(100, 128))


def test_vocabulary_and_end_come_from_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    _run(monkeypatch, _Tokenizer(), **SIZES)
    model = GPTModel()
    assert (model.config.tokenizer_vocab_size, model.config.vocab_size) == (200, 256)
    assert model.generation_config.eos_token_id == 199


def test_vocabulary_holds_the_tokenizers_ids_whatever_the_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NullTokenizer's end of document is one more than --vocab-size."""
    _run(monkeypatch, _Tokenizer(), **SIZES, vocab_size=128, tokenizer_type="NullTokenizer")
    assert GPTModel().config.vocab_size == 256


def test_missing_sizes_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    _run(monkeypatch, hidden_size=64)
    with pytest.raises(ConfigurationError) as caught:
        GPTModel()
    assert caught.value.problems == [
        "GPTModel() reads its sizes from the flags: give --num-layers, --num-attention-heads and "
        "--seq-length (or --max-position-embeddings).",
        "GPTModel() needs --vocab-size, or a tokenizer: there is no tokenizer: give "
        "--tokenizer-type and --vocab-file.",
    ]


def test_problems_are_told_together() -> None:
    with pytest.raises(ConfigurationError) as caught:
        GPTConfig(
            num_layers=6, hidden_size=100, num_attention_heads=6, num_query_groups=4,
            position_embedding_type="alibi", normalization="BatchNorm", num_experts=[4, 8],
            moe_layer_freq=2, moe_router_topk=5, moe_loss_coeff=0.0, moe_z_loss_coeff=0.1,
        )  # fmt: skip
    assert caught.value.problems == [
        "position_embedding_type 'alibi' is unknown: use learned_absolute or rope or none.",
        "normalization 'BatchNorm' is unknown: use LayerNorm or RMSNorm.",
        "num_attention_heads 6 does not divide hidden_size 100.",
        "num_query_groups 4 does not divide num_attention_heads 6.",
        "num_experts has 2 numbers, but there are 3 mixture-of-experts layers (every 2. of 6): "
        "give one number, or 3.",
        "moe_router_topk 5 is above num_experts 4.",
        "moe_z_loss_coeff needs a moe_loss_coeff above 0: both losses leave the model as one "
        "number, which is multiplied by moe_loss_coeff.",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0, "vocab_size": 0}, "num_layers, vocab_size must be at least 1."),
        ({"num_experts": []}, r"num_experts is \[\]: give numbers of at least 1"),
        ({"num_experts": [1, 1, 1]}, "num_experts has 3 numbers, but there are 12 mixture"),
        ({"num_experts": 8, "moe_layer_freq": 13}, "13 leaves no mixture-of-experts layer in 12"),
        (
            {"position_embedding_type": "rope", "rotary_percent": 0.05},
            "rotary_percent 0.05 of the head size 64 is 3, which is no even number above 0",
        ),
    ],
)
def test_problem_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GPTConfig(**options)
