"""How losses are made: documents kept apart, what counts, two means brought to one weight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForPreTraining,
    BloomConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MistralConfig,
    RwkvConfig,
)

from rapidformer.data.batch import describe_batch
from rapidformer.data.update import MicroBatch, Update
from rapidformer.dist.topology import Topology
from rapidformer.errors import ModelError
from rapidformer.models.gpt import GPTConfig, GPTModel
from rapidformer.objectives import BoundObjective, Context
from rapidformer.optim.gradients import scale_loss
from rapidformer.tasks.pretraining.objectives import (
    HiddenTokensAndOrder,
    NextToken,
    NextTokenInMegatronsForm,
)
from rapidformer.tasks.pretraining.runner import check_documents

END = 9
TOKENIZER: Any = SimpleNamespace(eod=END)


def make_args(**said: bool) -> Any:
    names = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")
    return SimpleNamespace(seq_length=16, **{name: said.get(name, False) for name in names})


def build_decoder(kind: str) -> Any:
    torch.manual_seed(0)
    family, _, attention = kind.partition("-")
    if family == "gpt":
        config = GPTConfig(
            num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=16,
            max_position_embeddings=16, hidden_dropout=0.0, attention_dropout=0.0,
        )  # fmt: skip
        return GPTModel(config)
    if family == "gpt2":
        shape = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=16, n_positions=16)
        return GPT2LMHeadModel._from_config(shape, attn_implementation=attention).eval()
    shape = LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=16, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(shape, attn_implementation=attention)


def make_objective(kind: str, **said: bool) -> NextToken:
    chosen = NextTokenInMegatronsForm if kind == "gpt" else NextToken
    return chosen(make_args(**said), TOKENIZER)


def compute(kind: str, model: Any, text: torch.Tensor, **said: bool) -> tuple[Any, Any]:
    batch = {"text": text}
    term: Any = make_objective(kind, **said).compute(model, batch, Context())
    return term.mean, term.count


def get_logits(kind: str, model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens) if kind == "gpt" else model(tokens).logits


@pytest.mark.parametrize("kind", ["gpt", "gpt2-eager", "gpt2-sdpa", "llama-eager", "llama-sdpa"])
def test_documents_in_a_row_do_not_see_each_other(kind: str) -> None:
    """Loss and every gradient are those of the documents alone."""
    model = build_decoder(kind)
    text = torch.tensor([[1, 2, 3, END, 4, 5, END, 6, 7], [8, 1, END, 2, 3, 4, 5, 6, 1]])
    loss, _ = compute(kind, model, text, reset_attention_mask=True, reset_position_ids=True)
    loss.backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    pieces = []
    for row in text:
        ends = [i + 1 for i in range(8) if row[i] == END]
        for start, stop in zip([0, *ends], [*ends, 8], strict=True):
            logits = get_logits(kind, model, row[None, start:stop])[0]
            following = row[start + 1 : stop + 1]
            pieces.append(functional.cross_entropy(logits, following, reduction="sum"))
    alone = torch.stack(pieces).sum() / 16
    alone.backward()
    torch.testing.assert_close(loss, alone, rtol=1e-6, atol=0)
    scale = max(float(p.grad.norm()) for p in model.parameters())
    for name, parameter in model.named_parameters():
        difference = float((parameter.grad - together[name]).norm())
        assert difference < 2e-6 * scale, name


@pytest.mark.parametrize("kind", ["gpt", "gpt2-sdpa"])
def test_without_resets_a_row_is_one_text(kind: str) -> None:
    model = build_decoder(kind)
    text = torch.tensor([[1, 2, 3, END, 4, 5, END, 6, 7]])
    loss, weight = compute(kind, model, text)
    logits = get_logits(kind, model, text[:, :-1])
    expected = functional.cross_entropy(logits[0], text[0, 1:])
    torch.testing.assert_close(loss, expected)
    assert weight == 1, "rows: each has as many tokens"


@pytest.mark.parametrize("kind", ["gpt", "gpt2-sdpa"])
def test_what_follows_an_end_need_not_count(kind: str) -> None:
    model = build_decoder(kind)
    text = torch.tensor([[1, 2, 3, END, 4, 5, END, 6, 7]])
    loss, weight = compute(kind, model, text, eod_mask_loss=True)
    logits = get_logits(kind, model, text[:, :-1])[0]
    losses = functional.cross_entropy(logits, text[0, 1:], reduction="none")
    counted = text[0, :-1] != END
    torch.testing.assert_close(loss, losses[counted].mean())
    assert float(weight) == 6


def test_terms_of_bert_are_means_over_the_whole_update() -> None:
    """Micro-batches with unequal numbers of hidden tokens, also none: summed they are the whole."""
    torch.manual_seed(0)
    shape = BertConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=32,
        vocab_size=16, max_position_embeddings=8,
    )  # fmt: skip
    model = BertForPreTraining(shape).eval()
    ids = torch.randint(5, 16, (4, 8))
    labels = torch.full((4, 8), -100)
    for row, count in enumerate((0, 5, 2, 1)):
        labels[row, :count] = ids[row, :count]
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
        "labels": labels,
        "next_sentence_label": torch.tensor([0, 1, 1, 0]),
    }
    objective = HiddenTokensAndOrder(make_args(), TOKENIZER)
    forward = BoundObjective(objective, model)

    def compute_parts(*slices: slice) -> list[Any]:
        pieces = [{name: value[rows] for name, value in batch.items()} for rows in slices]
        update = Update(
            tuple(
                MicroBatch(piece, describe_batch(piece), False, False, 0, number)
                for number, piece in enumerate(pieces)
            )
        )
        prepared = forward.prepare(update, Topology(), torch.device("cpu"))
        return [forward(each.batch) for each in prepared]

    (whole,) = compute_parts(slice(0, 4))
    torch.testing.assert_close(whole.loss, model(**batch).loss)
    assert [count for _, count in whole.parts.values()] == [8, 4]
    torch.testing.assert_close(whole.loss, sum(part for part, _ in whole.parts.values()))
    parts = compute_parts(slice(0, 1), slice(1, 4))
    summed = sum(part.loss * part.weight for part in parts)
    torch.testing.assert_close(summed / whole.weight, whole.loss)


@pytest.mark.parametrize(
    ("shape", "flags", "message"),
    [
        (BloomConfig(n_layer=1, hidden_size=16, n_head=2, vocab_size=16),
         ["reset_attention_mask"], "does not accept a query-by-key attention mask"),
        (BloomConfig(n_layer=1, hidden_size=16, n_head=2, vocab_size=16),
         ["reset_position_ids"], "does not accept position_ids"),
        (RwkvConfig(num_hidden_layers=2, hidden_size=16, vocab_size=16, context_length=16),
         ["reset_attention_mask"], "lets a document see the one before it despite the mask"),
        (MarianConfig(d_model=16, decoder_layers=1, vocab_size=16, decoder_attention_heads=2,
                      pad_token_id=0, max_position_embeddings=16),
         ["reset_attention_mask", "reset_position_ids"], "does not restart the positions"),
        (MistralConfig(sliding_window=8, num_hidden_layers=1, hidden_size=16, vocab_size=16,
                       num_attention_heads=2, num_key_value_heads=2, intermediate_size=16),
         ["reset_attention_mask"], "a sliding window of 8 tokens, shorter than --seq-length 16"),
    ],
    ids=["mask", "positions", "recurrent", "fixed positions", "window"],
)  # fmt: skip
def test_a_model_that_does_not_keep_documents_apart_is_refused(
    shape: Any, flags: list[str], message: str
) -> None:
    objective = make_objective("llama", **dict.fromkeys(flags, True))
    with pytest.raises(ModelError, match=rf"{flags[-1].replace('_', '-')}: .*{message}"):
        check_documents(objective, AutoModelForCausalLM.from_config(shape))
    check_documents(objective, build_decoder("llama-sdpa"))


def test_rows_of_nothing_but_ends_have_no_gradient() -> None:
    """Where what follows an end does not count, such a micro-batch has nothing to count."""
    model = build_decoder("gpt")
    text = torch.full((2, 9), END)
    loss, weight = compute("gpt", model, text, eod_mask_loss=True)
    scale_loss(loss, weight, 1.0).backward()
    assert float(weight) == 0
    assert all(float(p.grad.abs().sum()) == 0 for p in model.parameters())
