"""Attention in a model's own code: its own results, by fused attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from rapidformer.accel.applied import Applied
from rapidformer.accel.attention.own_code import fused, modules, scores
from rapidformer.accel.attention.own_code.modules import apply_own_code, is_applied
from rapidformer.accel.recompute.blocks import apply_recompute
from rapidformer.accel.unpad.unpadding import apply_unpadding
from rapidformer.compat.transformers_models import has_own_attention_code
from rapidformer.errors import RapidformerError
from rapidformer.models.plan import find_plan
from tests.accel.test_applied import check_plain, look

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
BERT = {**SIZES, "intermediate_size": 24, "max_position_embeddings": 40,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "n_ctx": 32,
       "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}  # fmt: skip
SEQ2SEQ = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
           "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
           "dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 32}  # fmt: skip
XLM = {"emb_dim": 16, "n_layers": 2, "n_heads": 2, "dropout": 0.0, "attention_dropout": 0.0,
       "n_langs": 1, "max_position_embeddings": 32}  # fmt: skip
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt_neo": (2, {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "window_size": 4,
                    "attention_types": [[["global", "local"], 1]], "embed_dropout": 0.0,
                    "attention_dropout": 0.0, "resid_dropout": 0.0}),
    "gptj": (2, {**GPT, "rotary_dim": 4}),
    "codegen": (2, {**GPT, "n_head": 4, "n_embd": 32, "rotary_dim": 4}),
    "bloom": (2, {"hidden_size": 16, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.0,
                  "attention_dropout": 0.0}),
    "mpt": (2, {"d_model": 16, "n_layers": 2, "n_heads": 2, "expansion_ratio": 2,
                "max_seq_len": 32}),
    "mpnet": (2, BERT),
    "rembert": (2, {**BERT, "input_embedding_size": 8}),
    "roformer": (2, BERT),
    "luke": (2, {**BERT, "entity_vocab_size": 9, "entity_emb_size": 8}),
    "xglm": (2, {"d_model": 16, "num_layers": 2, "attention_heads": 2, "ffn_dim": 24,
                 "dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}),
    "xlm": (2, XLM),
    "flaubert": (2, XLM),
    "xlnet": (2, {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "dropout": 0.0}),
    "mvp": (3, SEQ2SEQ),
    "prophetnet": (4, {"hidden_size": 16, "num_encoder_layers": 1, "num_decoder_layers": 1,
                       "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2,
                       "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "dropout": 0.0,
                       "attention_dropout": 0.0, "activation_dropout": 0.0}),
    "longt5": (1, {"d_model": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "d_ff": 24,
                   "dropout_rate": 0.0, "local_radius": 4}),
}  # fmt: skip
"""How often a model calls attention of its own, and its sizes."""
DECODERS = {"mvp", "prophetnet", "longt5"}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """On a CPU too; what was attended to, and what was computed after all."""
    seen: list[str] = []

    def note(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.append(name)
            return plain(*args)

        return call

    monkeypatch.setattr(modules, "_DEVICES", ["cpu"])
    monkeypatch.setattr(fused, "attend", note("attended", fused.attend))
    monkeypatch.setattr(scores.Node, "compute", note("computed", scores.Node.compute))
    return seen


def build(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    config = AutoConfig.for_model(name, vocab_size=60, **{**ids, **MODELS[name][1], **more})
    model = AutoModel.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # scores of about one
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model.train()


def make_batch(name: str, side: str = "right") -> dict[str, Tensor]:
    mask = torch.arange(21) < torch.tensor([21, 3, 14])[:, None]
    mask = mask.flip(1) if side == "left" else mask | (side == "none")
    ids = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    return {**batch, "decoder_input_ids": ids.flip(1)} if name in DECODERS else batch


def run(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hidden states of real tokens, and all gradients."""
    model.zero_grad()
    hidden = model(**batch).last_hidden_state
    real = batch["attention_mask"][..., None] if "decoder_input_ids" not in batch else 1
    (hidden * real).cos().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden": (hidden * real).detach(), **found}


def check(found: dict[str, Tensor], expected: dict[str, Tensor], error: float = 1e-5) -> None:
    assert list(found) == list(expected)
    for name, value in found.items():
        scale = max(float(expected[name].abs().max()), 0.5)
        torch.testing.assert_close(value, expected[name], rtol=0, atol=error * scale, msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_its_own_results(name: str, calls: list[str]) -> None:
    model, batches = build(name), [make_batch(name, side) for side in ("none", "right", "left")]
    expected = [run(model, batch) for batch in batches]
    assert calls == [] and apply_own_code(model) >= 1
    for batch, theirs in zip(batches, expected, strict=True):
        calls.clear()
        check(run(model, batch), theirs)
        assert calls.count("attended") == MODELS[name][0]
        assert "computed" not in calls or name == "xlnet"  # its scores of positions are computed


@pytest.mark.parametrize("name", MODELS)
def test_16_bits(name: str, calls: list[str]) -> None:
    model, batch = build(name), make_batch(name)
    expected = model(**batch).last_hidden_state
    with torch.autocast("cpu", dtype=torch.bfloat16):
        usual = model(**batch).last_hidden_state
        apply_own_code(model)
        found = model(**batch).last_hidden_state
    assert calls.count("attended") == MODELS[name][0]
    assert found.dtype == usual.dtype
    real = batch["attention_mask"][..., None] if name not in DECODERS else 1
    mine, theirs = ((each - expected).mul(real).norm() for each in (found, usual))
    assert mine < 1.3 * theirs


@pytest.mark.parametrize("name", ["gpt_neo", "bloom", "mpnet", "xglm"])
def test_without_padding(name: str, calls: list[str]) -> None:
    model, batch = build(name), make_batch(name)
    expected = run(model, batch)
    apply_own_code(model)
    assert apply_unpadding(model, find_plan(model)) is None
    calls.clear()
    check(run(model, batch), expected)
    assert "attended" in calls and "computed" not in calls


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputed_blocks(granularity: str) -> None:
    model, batch = build("gptj"), make_batch("gptj")
    expected = run(model, batch)
    apply_own_code(model)
    apply_recompute(model, find_plan(model), granularity=granularity)
    check(run(model, batch), expected)


@pytest.mark.parametrize("kind", ["gpt_neo", "bloom", "mpnet", "prophetnet", "xlm"])
def test_weights_that_are_asked_for(kind: str, calls: list[str]) -> None:
    model, batch = build(kind, attn_implementation="eager"), make_batch(kind)
    expected = model(**batch, output_attentions=True)
    apply_own_code(model)
    found = model(**batch, output_attentions=True)
    assert "attended" in calls
    pairs = [
        pair
        for name in expected
        if "attentions" in name
        for pair in zip(found[name], expected[name], strict=True)
    ]
    assert len(pairs) >= 2
    for mine, theirs in pairs:
        assert type(mine) is Tensor and mine.requires_grad
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_weights_that_a_hook_reads() -> None:
    model, batch = build("gptj"), make_batch("gptj")
    seen: list[Tensor] = []
    attention = model.h[1].attn
    attention.register_forward_hook(lambda module, inputs, output: seen.append(output[1]))
    model(**batch)
    apply_own_code(model)
    model(**batch)
    theirs, mine = seen
    assert scores.is_lazy(mine) and mine.shape == theirs.shape
    torch.testing.assert_close(mine + 0, theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(copy.deepcopy(mine.detach()), theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(mine.sum(-1), torch.ones(3, 2, 21))


def test_functions_that_the_user_replaces(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = build("roformer"), make_batch("roformer")
    softmax = nn.functional.softmax

    def halve(values: Tensor, **options: Any) -> Tensor:
        return softmax(values / 2, **options)

    monkeypatch.setattr(nn.functional, "softmax", halve)
    expected = run(model, batch)
    apply_own_code(model)
    check(run(model, batch), expected, 0)
    assert calls == []


class Sharpened(nn.Module):
    """The user's own, in place of dropout."""

    def forward(self, weights: Tensor) -> Tensor:
        weights = weights + 0
        weights[..., 0] = weights[..., 0] * 2
        return weights / weights.sum(-1, keepdim=True)


def test_code_that_edits_weights(calls: list[str]) -> None:
    model, batch = build("roformer"), make_batch("roformer")
    model.encoder.layer[1].attention.self.dropout = Sharpened()
    expected = run(model, batch)
    apply_own_code(model)
    check(run(model, batch), expected)
    assert calls.count("attended") == 1 and "computed" in calls


@pytest.mark.parametrize(
    "edit",
    [
        lambda scores: scores.tanh() * scores.sin(),
        lambda scores: scores.masked_fill(scores > 0, -1e4),
        lambda scores: scores.mul_(2).add_(1).sub_(scores.mean()),
        lambda scores: scores.view(6, 5, 5).mul_(3) + scores.flatten(0, 1),
        lambda scores: (scores[..., 0].zero_(), scores + 1)[1],
        lambda scores: (scores.masked_fill_(scores < 0, 0.5), scores.transpose(2, 3))[1],
        lambda scores: torch.where(scores > 0, scores, torch.zeros(())).softmax(1),
        lambda scores: torch.cat([scores, scores.softmax(-1)], -1).max(-1)[0],
        lambda scores: (scores.softmax(-1), scores * 2)[1] @ torch.ones(2, 3, 5, 8),
        lambda scores: torch.nn.functional.dropout(scores, 0.5, training=True) * 0,
        lambda scores: scores.to(torch.float64).softmax(-1, dtype=torch.float32) + 1,
    ],
)
def test_code_that_edits_scores(edit: Callable[[Tensor], Tensor]) -> None:
    """Anything unknown computes them, in the middle of known operations, too."""
    found, leaves = [], []
    for context in (modules._Deferring(nn.Identity()), nullcontext()):
        torch.manual_seed(0)
        query, key, mask = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 8, 5), torch.randn(2, 1, 1, 5)
        leaves = [query.requires_grad_(), key.requires_grad_(), mask.requires_grad_()]
        with context:
            result = edit(torch.matmul(query, key) / 2 + mask)
        result = scores.compute_all(result)
        found.append([result, *torch.autograd.grad(result.sin().sum(), leaves)])
    for mine, theirs in zip(*found, strict=True):
        assert type(mine) is Tensor and torch.equal(mine, theirs)


def test_a_class_of_the_users_own_is_left_alone() -> None:
    model = build("gptj")
    attention = type(model.h[0].attn)
    own = type("Own", (attention,), {"__module__": "own"})
    assert has_own_attention_code(attention) and not has_own_attention_code(own)
    model.h[0].attn.__class__ = own
    assert apply_own_code(model) == 1


def test_dropout(calls: list[str]) -> None:
    """The mean of attention with dropout is attention without."""
    model, batch = build("gptj", attn_pdrop=0.25), make_batch("gptj", "none")
    attention, hidden = model.h[0].attn, torch.randn(2, 16, 16)
    places = torch.arange(16)[None]
    apply_own_code(model)
    model.eval()
    expected = attention(hidden, position_ids=places)[0]
    assert torch.equal(attention(hidden, position_ids=places)[0], expected)
    model.train()
    found = torch.stack([attention(hidden, position_ids=places)[0] for _ in range(300)])
    assert not torch.equal(found[0], found[1])
    error = (found.mean(0) - expected).abs().max() / expected.abs().max()
    assert error < 0.08 and calls.count("attended") == 302
    run(model, batch)


def test_gradients_of_gradients() -> None:
    def penalise(model: Any, hidden: Tensor) -> list[Tensor]:
        hidden = hidden.detach().requires_grad_()
        output = model(inputs_embeds=hidden).last_hidden_state
        gradient = torch.autograd.grad(output.cos().sum(), hidden, create_graph=True)[0]
        loss = gradient.square().sum() + output.sin().sum()
        parameters = [p for n, p in model.named_parameters() if "h." in n or "layer" in n]
        return [loss, *torch.autograd.grad(loss, parameters, allow_unused=True)]

    hidden = torch.randn(2, 12, 16)
    for name in ("gptj", "mpnet"):
        model = build(name)
        expected = penalise(model, hidden)
        apply_own_code(model)
        for mine, theirs in zip(penalise(model, hidden), expected, strict=True):
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_large_biases_are_not_rounded_in_16_bits() -> None:
    """ALiBi's numbers depend on the place in the row; only their differences matter."""
    model = build("mpt")
    attention, hidden = model.blocks[0].attn, torch.randn(1, 24, 16)
    mask = torch.ones(24, 24, dtype=torch.bool).triu(1)[None, None]
    bias = torch.arange(24.0).view(1, 1, 24).expand(2, 1, 24) * 0.3 - 3000
    expected = attention(hidden, position_bias=bias, attention_mask=mask)[0]
    apply_own_code(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention(hidden, position_bias=bias, attention_mask=mask)[0]
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_rows_without_a_key() -> None:
    """The lowest numbers absorb a score: attention is uniform, in 16 bits too."""
    form = modules.Form(nn.Identity(), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 8, 4), (1, 2))
    lowest = torch.full((1, 1, 4, 4), torch.finfo(torch.float32).min)
    weights = form.add(lowest, (1, 2, 4, 4))
    value = torch.randn(1, 2, 4, 8)
    assert weights is not None
    for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        found = fused.attend(weights, value, dtype).float()
        expected = value.mean(-2, keepdim=True).expand_as(value)
        torch.testing.assert_close(found, expected, rtol=0, atol=error)


def test_views_of_scores() -> None:
    wide = modules.Form(nn.Identity(), torch.randn(6, 4, 8), torch.randn(6, 8, 4), (6,))
    split = wide.view((2, 3, 4, 4), (6, 4, 4))
    assert split is not None and split.lead == (2, 3)
    masked = split.add(torch.randn(2, 1, 1, 4), (2, 3, 4, 4))
    assert masked is not None and masked.view((6, 4, 4), (2, 3, 4, 4)) is masked
    again = masked.add(torch.randn(6, 1, 4), (6, 4, 4))
    assert again is not None and again.bias is not None and again.bias.shape == (2, 3, 1, 4)
    assert masked.view((3, 2, 4, 4), (6, 4, 4)) is None
    assert masked.add(torch.randn(4, 1, 4), (6, 4, 4)) is None


@pytest.mark.parametrize("name", ["gpt_neo", "xglm", "mpnet"])
def test_inference_mode(name: str) -> None:
    """Its tensors do not know how often they were changed."""
    model, batch = build(name).eval(), make_batch(name)
    with torch.inference_mode():
        expected = model(**batch).last_hidden_state
        apply_own_code(model)
        error = (model(**batch).last_hidden_state - expected).abs().max()
    assert error < 1e-5 * expected.abs().max()


def test_a_view_sees_what_its_scores_become() -> None:
    query, key = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    hidden = torch.ones(8, 8, dtype=torch.bool).triu(1)
    found = []
    for context in (modules._Deferring(nn.Identity()), nullcontext()):
        with context:
            whole = query @ key
            view = whole.view(6, 8, 8)
            whole.masked_fill_(hidden, -1e38)
            found.append(scores.compute_all(view.softmax(-1) @ key.view(6, 8, 8)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_inputs_that_change_in_between(place: int) -> None:
    """What they were is gone, so attention is refused."""
    query, key, mask = inputs = torch.randn(2, 8, 8), torch.randn(2, 8, 8), torch.randn(8, 8)
    with modules._Deferring(nn.Identity()):
        weights = (query @ key + mask).softmax(-1)
        inputs[place].zero_()
        with pytest.raises(scores.ChangedInPlaceError, match="changed in place"):
            weights @ key.clone()


def test_scores_that_leave_torch_functions_are_computed() -> None:
    """Constructors are not asked of a subclass, and would copy NaN without a word."""
    query, key = torch.randn(2, 8, 8), torch.randn(2, 8, 8)
    with modules._Deferring(nn.Identity()):
        product = query @ key
        assert scores.is_lazy(product)
        assert torch.equal(torch.Tensor(product), torch.bmm(query, key))


def test_weights_with_dropout_that_are_used_twice() -> None:
    query, key = torch.randn(2, 8, 8), torch.randn(2, 8, 8)
    with modules._Deferring(nn.Identity()):
        plain = (query @ key).softmax(-1)
        assert torch.equal(plain @ key, plain @ key)
        dropped = nn.functional.dropout(plain, 0.5)
        dropped @ key
        with pytest.raises(RapidformerError, match="Identity uses attention weights with dropout"):
            dropped @ query


def test_no_gradient_of_a_gradient_with_dropout() -> None:
    model, hidden = build("gptj", attn_pdrop=0.25).train(), torch.randn(2, 12, 16)
    apply_own_code(model)
    hidden.requires_grad_()
    output = model(inputs_embeds=hidden).last_hidden_state
    with pytest.raises(RapidformerError, match="--without own-attention-code"):
        torch.autograd.grad(output.sum(), hidden, create_graph=True)


def test_undone_when_the_engine_closes() -> None:
    model, batch = build("gpt_neo"), make_batch("gpt_neo")
    before, expected = look(model), run(model, batch)
    applied = Applied(model)
    with applied.row("own attention code"):
        apply_own_code(model)
    assert is_applied(model)
    assert applied.undo() and not is_applied(model)
    check_plain(model, before)
    check(run(model, batch), expected, 0)
