"""Megatron's calling form: what goes in, what comes out, and what a token may look at."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from rapidformer.errors import ModelError
from rapidformer.models import GPTModel
from rapidformer.models.own_loss import shifts_labels
from rapidformer.models.plan import find_plan

from .small import (
    EXPERTS,
    KINDS,
    LENGTH,
    MODERN,
    VOCABULARY,
    get_losses,
    hide_future,
    make_config,
    make_model,
    make_tokens,
)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_give_the_loss_of_every_token(kind: str) -> None:
    model, tokens, labels = make_model(**KINDS[kind]), make_tokens(), make_tokens(seed=2)
    losses = get_losses(model, tokens, labels)
    logits = model(tokens, None, None)
    assert logits.shape == (3, LENGTH, VOCABULARY)
    assert losses.shape == labels.shape and losses.dtype is torch.float32
    # fully_shard warns of views: a user who masks the losses in place would lose gradients.
    assert not losses._is_view()
    expected = -logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(losses, expected)


def test_dense_gives_a_tensor_and_experts_a_tuple() -> None:
    tokens = make_tokens()
    assert isinstance(make_model()(tokens, labels=tokens), torch.Tensor)
    model = make_model(num_experts=4)
    losses, *moe_losses = model(tokens, labels=tokens)
    assert losses.shape == tokens.shape
    assert [loss.shape for loss in moe_losses] == [(), ()]
    assert isinstance(model(tokens), torch.Tensor)
    assert model.moe_loss_coeff == 0.01


def test_label_minus_100_has_no_loss() -> None:
    model, tokens = make_model(), make_tokens()
    labels = make_tokens(seed=2)
    expected = get_losses(model, tokens, labels)
    labels[:, ::3] = -100
    losses = get_losses(model, tokens, labels)
    assert not losses[:, ::3].any()
    assert torch.equal(losses[:, 1::3], expected[:, 1::3])


@pytest.mark.parametrize("kind", KINDS)
def test_no_mask_is_causal_and_equals_megatrons_mask(kind: str) -> None:
    model, tokens = make_model(**KINDS[kind]).eval(), make_tokens()
    logits = model(tokens)
    masked = model(tokens, torch.arange(LENGTH).expand(3, -1), hide_future(LENGTH))
    torch.testing.assert_close(logits, masked, atol=1e-4, rtol=1e-4)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % VOCABULARY
    difference = (model(changed) - logits).abs().amax(-1)
    assert not difference[:, :7].any()
    assert (difference[:, 7:] > 1e-3).all()


@pytest.mark.parametrize("options", [{}, MODERN], ids=["learned", "rotary"])
def test_reset_mask_and_positions_make_documents_independent(options: dict[str, object]) -> None:
    """Two documents in one row are as if each stood alone."""
    model, tokens = make_model(**options).eval(), make_tokens()
    cut = 5
    mask = hide_future(LENGTH).repeat(3, 1, 1, 1)
    mask[:, :, cut:, :cut] = True
    positions = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)]).expand(3, -1)
    together = model(tokens, positions, mask)
    torch.testing.assert_close(together[:, :cut], model(tokens[:, :cut]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(together[:, cut:], model(tokens[:, cut:]), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(together[:, cut:], model(tokens)[:, cut:], atol=1e-2)


def test_mask_may_differ_from_row_to_row() -> None:
    model, tokens = make_model().eval(), make_tokens(rows=2)
    mask = hide_future(LENGTH).repeat(2, 1, 1, 1)
    mask[1, :, 6:, :6] = True
    logits = model(tokens, None, mask)
    torch.testing.assert_close(logits[0], model(tokens)[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits[1, 6:], model(tokens)[1, 6:], atol=1e-2)


def test_padding_mask_hides_padding_and_stays_finite() -> None:
    """Hugging Face's mask [batch, tokens], 1 = real, with padding on the left."""
    model, tokens = make_model(**MODERN).eval(), make_tokens(rows=2)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(tokens, positions, mask)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[1:, 4:], model(tokens[1:, 4:]), atol=1e-4, rtol=1e-4)


def test_mask_of_another_kind_is_refused() -> None:
    with pytest.raises(ModelError, match=r"float32 of shape \[1, 1, 12, 12\].*True = hidden"):
        make_model()(make_tokens(), None, torch.zeros(1, 1, LENGTH, LENGTH))


def test_more_tokens_than_positions_are_refused() -> None:
    with pytest.raises(ModelError, match="33 tokens are more than the 32 positions"):
        make_model()(make_tokens(length=33))
    assert make_model(**MODERN)(make_tokens(length=33)).shape[1] == 33


@pytest.mark.parametrize(
    ("rate", "is_active"), [("hidden_dropout", True), ("attention_dropout", True), (None, False)]
)
def test_each_dropout_rate_has_its_effect_in_training_alone(
    rate: str | None, is_active: bool
) -> None:
    model = make_model(**({rate: 0.5} if rate else {})).train()
    tokens = make_tokens()
    assert torch.equal(model(tokens), model(tokens)) is not is_active
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_gradient(kind: str) -> None:
    model, tokens = make_model(**KINDS[kind]), make_tokens(rows=8)
    get_losses(model, tokens, make_tokens(rows=8, seed=2)).mean().backward()
    for name, parameter in model.named_parameters():
        # A key's bias shifts all scores of a query alike: softmax does not see it.
        is_blind = name.endswith("key.bias")
        assert parameter.grad is not None, name
        assert is_blind or parameter.grad.abs().max() > 1e-7, name


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_autocast_stays_near_fp32(kind: str) -> None:
    model, tokens = make_model(**KINDS[kind], init_method_std=0.05), make_tokens()
    exact = get_losses(model, tokens, tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = get_losses(model, tokens, tokens)
    rounded.mean().backward()
    assert rounded.dtype is torch.float32
    torch.testing.assert_close(rounded, exact, atol=0.1, rtol=0.05)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_model_in_bf16_runs(kind: str) -> None:
    model = make_model(**KINDS[kind]).to(torch.bfloat16)
    tokens = make_tokens()
    assert get_losses(model, tokens, tokens).dtype is torch.float32
    assert model(tokens).dtype is torch.bfloat16


def test_output_layers_start_smaller() -> None:
    model = make_model(num_layers=8, hidden_size=64, init_method_std=0.02, num_experts=4)
    layer = model.layers[3]
    small = 0.02 / 4  # sqrt(2 x 8 layers)
    assert layer.attention.query.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.attention.output.weight.std().item() == pytest.approx(small, rel=0.05)
    assert layer.feed_forward.experts.up.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.feed_forward.experts.down.std().item() == pytest.approx(small, rel=0.05)
    assert not layer.attention.output.bias.any()
    assert (model.final_norm.weight == 1).all()
    assert model.output.weight is model.word_embeddings.weight


def test_megatrons_keywords_are_accepted() -> None:
    model = GPTModel(
        make_config(), num_tokentypes=0, parallel_output=True, pre_process=True, post_process=True
    )
    tokens = make_tokens()
    logits = model(tokens, None, None, tokentype_ids=None, forward_method_parallel_output=False)
    assert torch.equal(logits, model(tokens))


def test_stages_and_token_types_are_refused() -> None:
    with pytest.raises(ModelError, match="never a stage of it: pre_process and post_process must"):
        GPTModel(make_config(), post_process=False)
    with pytest.raises(ModelError, match=r"num_tokentypes=2.*leave it at 0"):
        GPTModel(make_config(), num_tokentypes=2)


def test_plan_names_the_blocks_and_the_tie() -> None:
    model = make_model(**EXPERTS)
    plan = find_plan(model)
    assert plan.blocks == ("layers.0", "layers.1")
    assert plan.tied == (("word_embeddings.weight", "output.weight"),)
    assert not shifts_labels(model)


def test_learning_a_row_by_heart() -> None:
    model, tokens = make_model(init_method_std=0.05), make_tokens(rows=1, length=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = loss = get_losses(model, tokens[:, :-1], tokens[:, 1:]).mean()
    for _ in range(30):
        optimizer.zero_grad()
        loss = get_losses(model, tokens[:, :-1], tokens[:, 1:]).mean()
        loss.backward()
        optimizer.step()
    assert loss < 0.1 < first / 10
    predicted = model(tokens[:, :-1]).argmax(-1)
    assert torch.equal(predicted, tokens[:, 1:])


def test_importing_the_room_does_not_import_torch() -> None:
    code = "import sys, rapidformer.models as room; print('torch' in sys.modules, room.__all__)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.startswith("False ['GPTConfig'")


def test_fused_attention_has_no_square_tensor_without_a_mask() -> None:
    """The fast path hands torch "causal", not a mask."""
    seen: list[object] = []
    original = functional.scaled_dot_product_attention

    def record(*args: object, **options: object) -> torch.Tensor:
        seen.append((options["attn_mask"], options["is_causal"]))
        return original(*args, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", record)
        make_model()(make_tokens())
    assert seen == [(None, True)] * 2
