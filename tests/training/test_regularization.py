"""Label smoothing and NEFTune: what they compute, and that they are gone after training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from rapidformer.config import arguments_from_mapping
from rapidformer.errors import ConfigurationError
from rapidformer.log import warn_once
from rapidformer.training.regularization import regularize


def make_bert() -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, num_labels=3, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def test_smoothed_loss_of_a_classifier() -> None:
    model, ids, labels = make_bert(), torch.arange(6).reshape(2, 3), torch.tensor([0, 2])
    plain = model(input_ids=ids, labels=labels)
    with regularize(model, arguments_from_mapping({"label_smoothing": 0.2})):
        smoothed = model(input_ids=ids, labels=labels).loss
    log_probs = plain.logits.log_softmax(-1)
    expected = 0.8 * plain.loss + 0.2 * -log_probs.mean(-1).mean()
    torch.testing.assert_close(smoothed, expected)
    assert torch.equal(model(input_ids=ids, labels=labels).loss, plain.loss)


@pytest.mark.parametrize("returns", ["mapping", "tuple", "logits alone"])
def test_smoothed_loss_of_a_model_of_ones_own(returns: str) -> None:
    class Plain(torch.nn.Linear):
        def forward(self, x: Any, labels: Any = None) -> Any:
            logits = super().forward(x)
            loss = torch.nn.functional.cross_entropy(logits, labels)
            if returns == "mapping":
                return {"loss": loss, "logits": logits, "more": x}
            return (logits, x) if returns == "logits alone" else (loss, logits, x)

    torch.manual_seed(0)
    model, x, labels = Plain(4, 3), torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    with regularize(model, arguments_from_mapping({"label_smoothing": 0.2})):
        output = model(x, labels=labels)
    found = list(output.values()) if returns == "mapping" else list(output)
    expected = torch.nn.functional.cross_entropy(found[1], labels, label_smoothing=0.2)
    torch.testing.assert_close(found[0], expected)
    assert found[2] is x


def test_a_model_without_logits_is_not_smoothed_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Bare(torch.nn.Linear):
        def forward(self, x: Any, labels: Any = None) -> Any:
            return {"loss": super().forward(x).mean()}

    warn_once.cache_clear()
    model, x = Bare(4, 3), torch.randn(5, 4)
    with regularize(model, arguments_from_mapping({"label_smoothing": 0.2})):
        model(x, labels=torch.tensor([0, 2, 1, 1, 0]))
    assert "--label-smoothing has no effect: the model returns no logits" in caplog.text


def test_numbers_cannot_be_smoothed(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    model, ids = make_bert().train(), torch.arange(6).reshape(2, 3)
    model.config.problem_type = "regression"
    labels = torch.rand(2, 3)
    with regularize(model, arguments_from_mapping({"label_smoothing": 0.2})):
        model(input_ids=ids, labels=labels)
    assert "--label-smoothing has no effect" in caplog.text


def test_smoothed_loss_of_a_causal_model_is_shifted_and_skips_padding() -> None:
    config = GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    ids = torch.arange(8).reshape(2, 4)
    labels = ids.clone()
    labels[0, 2:] = -100
    logits = model(input_ids=ids).logits
    with regularize(model, arguments_from_mapping({"label_smoothing": 0.1})):
        smoothed = model(input_ids=ids, labels=labels).loss
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1), label_smoothing=0.1
    )
    torch.testing.assert_close(smoothed, expected)


def test_noise_only_while_training() -> None:
    model, ids = make_bert(), torch.arange(6).reshape(2, 3)
    embed = model.get_input_embeddings()
    plain = embed(ids)
    with regularize(model, arguments_from_mapping({"neftune_noise_alpha": 5.0})):
        noisy = model.train().get_input_embeddings()(ids)
        quiet = model.eval().get_input_embeddings()(ids)
    size = 5.0 / (3 * 16) ** 0.5
    assert 0 < (noisy - plain).abs().max() <= size
    assert torch.equal(quiet, plain)
    assert torch.equal(model.train().get_input_embeddings()(ids), plain)


def test_noise_needs_embeddings() -> None:
    args = arguments_from_mapping({"neftune_noise_alpha": 5.0})
    with (
        pytest.raises(ConfigurationError, match="Linear has no get_input_embeddings"),
        regularize(torch.nn.Linear(1, 1), args),
    ):
        pass
