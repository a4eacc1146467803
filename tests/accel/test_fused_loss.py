"""The loss that never holds all logits: same losses and gradients as torch's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from rapidformer import RapidformerEngine
from rapidformer.accel.fused_loss import chunked
from rapidformer.accel.fused_loss.chunked import Recipe, compute_losses
from rapidformer.accel.fused_loss.deferred import DeferredLogits
from rapidformer.accel.fused_loss.fused_loss import apply_fused_loss, find_head
from rapidformer.errors import ConfigurationError

WORDS, WIDTH = 300, 16
COMMON = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 1,
          "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32,
          "head_dim": 8, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2}  # fmt: skip
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": {}, "phi": {}, "gpt_neox": {}, "bloom": {},
    "gpt2": {"n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": 32},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": WIDTH},
    "mistral": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 3.0}, "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, the last one smaller, though the tests have few rows."""
    monkeypatch.setattr(chunked, "choose_chunk", lambda rows, width, device: 8)


def build(kind: str, **given: Any) -> Any:
    torch.manual_seed(0)
    if kind in ("t5", "bart"):
        config = AutoConfig.for_model(
            kind, vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
            encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, dropout=0.0,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout_rate=0.0,
            max_position_embeddings=32, decoder_start_token_id=0, pad_token_id=0, **given,
        )  # fmt: skip
        return AutoModelForSeq2SeqLM.from_config(config)
    config = AutoConfig.for_model(kind, **{**COMMON, **given})
    if kind in ("bert", "roberta", "modernbert"):
        return AutoModelForMaskedLM.from_config(config)
    return AutoModelForCausalLM.from_config(config)


def run(model: Any, batch: dict[str, torch.Tensor], **more: Any) -> tuple[torch.Tensor, Any]:
    model.eval()  # without dropout, whose draws the two runs would not share
    outputs = model(**batch, **more)
    outputs.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return outputs.loss.detach(), gradients


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, WORDS, (3, 9), generator=generator)
    labels = ids.clone()
    labels[0, 5:] = -100
    labels[2, :4] = -100
    return {"input_ids": ids, "labels": labels}


def check(model: Any, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Loss and every gradient are those of the model as it is; no logits were computed."""
    batch = make_batch()
    loss, gradients = run(model, batch, **more)
    head = find_head(model)
    assert head is not None
    apply_fused_loss(head)
    monkeypatch.setattr(DeferredLogits, "compute", lambda self: pytest.fail("logits were computed"))
    fused_loss, fused = run(model, batch, **more)
    torch.testing.assert_close(fused_loss, loss, rtol=1e-5, atol=1e-6)
    assert fused.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(fused[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", CAUSAL)
def test_causal_models(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(build(kind, **CAUSAL[kind]), monkeypatch)


@pytest.mark.parametrize("kind", ["bert", "roberta", "t5"])
def test_masked_and_sequence_to_sequence_models(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(build(kind), monkeypatch)


def test_a_model_that_adds_to_its_logits_computes_them() -> None:
    """BART adds a bias of its own after the head."""
    model = build("bart")
    expected = run(model, make_batch())
    apply_fused_loss(find_head(model))
    loss, gradients = run(model, make_batch())
    torch.testing.assert_close(loss, expected[0])
    for name, gradient in expected[1].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


class TinyGPT(nn.Module):
    """A custom model: nothing says which of its layers is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.inner = nn.Linear(WIDTH, 32)
        self.outer = nn.Linear(32, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        logits = self.head(hidden + self.outer(self.inner(hidden).relu()))
        loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
        return SimpleNamespace(loss=loss, logits=logits)


def test_the_head_of_a_custom_model(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    check(TinyGPT(), monkeypatch)


def test_a_count_given_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    check(build("llama"), monkeypatch, num_items_in_batch=torch.tensor(17))


def test_a_frozen_head_gets_no_gradient() -> None:
    model = build("llama")
    head = find_head(model)
    head.weight.requires_grad_(False)
    expected = run(model, make_batch())
    apply_fused_loss(head)
    loss, gradients = run(model, make_batch())
    torch.testing.assert_close(loss, expected[0])
    assert "lm_head.weight" not in gradients
    for name, gradient in expected[1].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_logits_are_there_for_code_that_asks() -> None:
    model = build("llama").eval()
    batch = make_batch()
    expected = model(**batch).logits
    apply_fused_loss(find_head(model))
    outputs = model(**batch)
    assert isinstance(outputs.logits, DeferredLogits) and outputs.logits.shape == expected.shape
    assert torch.equal(outputs.logits.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(outputs.logits[:, -1, :5], expected[:, -1, :5])
    torch.testing.assert_close(torch.log_softmax(outputs.logits, -1), expected.log_softmax(-1))
    (outputs.loss + outputs.logits.pow(2).mean()).backward()
    found = model.lm_head.weight.grad.clone()
    model.zero_grad()
    reference = build("llama").eval()
    outputs = reference(**batch)
    (outputs.loss + outputs.logits.pow(2).mean()).backward()
    torch.testing.assert_close(found, reference.lm_head.weight.grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert type(model(**batch).logits) is torch.Tensor


ROWS = torch.randn(21, WIDTH, generator=torch.Generator().manual_seed(1))
TABLE = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(2)) * 0.3
LABELS = torch.randint(0, WORDS, (21,), generator=torch.Generator().manual_seed(3))


def make_leaves() -> list[torch.Tensor]:
    bias = torch.linspace(-1, 1, WORDS)
    return [x.clone().requires_grad_() for x in (ROWS, TABLE, bias)]


def measure_after_looking(model: Any, mode: Any) -> torch.Tensor:
    outputs = model(**make_batch())
    with mode():
        outputs.logits.argmax(-1)
    return outputs.loss + outputs.logits.logsumexp(-1).mean()


def measure_shifted(model: Any) -> torch.Tensor:
    batch = make_batch()
    logits = model(batch["input_ids"]).logits[..., :-1, :].contiguous()
    return functional.cross_entropy(logits.view(-1, WORDS), batch["labels"][:, 1:].reshape(-1))


def measure_outside_autocast(model: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(make_batch()["input_ids"]).logits
    return logits.float().pow(2).mean()


USES: dict[str, Any] = {
    "shifted": measure_shifted,
    "after no_grad": lambda model: measure_after_looking(model, torch.no_grad),
    "after inference_mode": lambda model: measure_after_looking(model, torch.inference_mode),
    "outside autocast": measure_outside_autocast,
    "named arguments": lambda model: (
        model(**make_batch()).logits.mul(other=2).reshape(shape=(-1, WORDS)).pow(2).mean()
    ),
    "some words": lambda model: model(**make_batch()).logits[:, :, :100, ...].pow(2).mean(),
}


@pytest.mark.parametrize("use", USES)
def test_a_loss_of_the_user(use: str) -> None:
    model = build("llama").eval()
    found = []
    for is_fused in (False, True):
        if is_fused:
            apply_fused_loss(find_head(model))
        loss = USES[use](model)
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "watch",
    [
        lambda head: head.register_forward_hook(lambda module, args, output: output * 2),
        lambda head: head.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        lambda head: head.register_full_backward_hook(lambda module, into, out: (into[0] * 2,)),
    ],
)
def test_a_users_hook_on_the_head_changes_the_same(watch: Any) -> None:
    model = build("llama")
    watch(find_head(model))
    expected = run(model, make_batch())
    apply_fused_loss(find_head(model))
    loss, gradients = run(model, make_batch())
    torch.testing.assert_close(loss, expected[0])
    for name, gradient in expected[1].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_a_function_in_place_of_the_heads_and_a_hook_on_all_modules_change_the_same() -> None:
    model = build("llama")
    head: Any = find_head(model)
    apply_fused_loss(head)
    expected = 2 * model(**make_batch()).logits.detach()
    forward = head.forward
    head.forward = lambda hidden: 2 * forward(hidden)
    torch.testing.assert_close(model(**make_batch()).logits, expected)
    del head.forward
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 2 if module is head else None
    )
    try:
        torch.testing.assert_close(model(**make_batch()).logits, expected)
    finally:
        handle.remove()


def test_a_gradient_that_would_be_lost_is_refused() -> None:
    model = build("llama").eval()
    apply_fused_loss(find_head(model))
    with pytest.raises(ConfigurationError, match=r"gradient of the logits.*--fused-loss off"):
        model(**make_batch()).logits.register_hook(lambda gradient: gradient * 2)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_every_gradient_equals_torchs(smoothing: float) -> None:
    labels = LABELS.clone()
    labels[::4] = -100
    recipe = Recipe(label_smoothing=smoothing)
    ours, theirs = make_leaves(), make_leaves()
    loss = compute_losses(*ours, labels, recipe).values
    expected = functional.cross_entropy(
        functional.linear(*theirs), labels, reduction="sum", label_smoothing=smoothing
    )
    torch.testing.assert_close(loss, expected)
    (loss * 0.5).backward()
    (expected * 0.5).backward()
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-4, atol=1e-5)


def plain_loss(*leaves: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(*leaves), LABELS, reduction="sum")


def fused_loss(*leaves: torch.Tensor) -> torch.Tensor:
    return compute_losses(leaves[0], leaves[1], leaves[2], LABELS, Recipe()).values


def test_a_second_backward_and_a_gradient_of_a_gradient() -> None:
    found = []
    for compute in (fused_loss, plain_loss):
        leaves = make_leaves()
        loss = compute(*leaves)
        loss.backward(retain_graph=True)
        (loss * 3).backward()
        (slope,) = torch.autograd.grad(compute(*leaves), leaves[0], create_graph=True)
        slope.pow(2).sum().backward()
        found.append([leaf.grad for leaf in leaves])
    for mine, reference in zip(*found, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight_type", [torch.float32, torch.float16])
def test_fp16_sums_do_not_overflow(
    weight_type: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One word in every row and one large feature: 2,048 * 60 is more than fp16 holds."""
    monkeypatch.setattr(chunked, "choose_chunk", lambda rows, width, device: 1024)
    hidden = torch.ones(2048, 4, dtype=torch.float16)
    hidden[:, 3] = 60
    weight = torch.full((8, 4), -0.5, dtype=weight_type)
    weight[1:] = 0
    weight.requires_grad_()
    labels = torch.zeros(2048, dtype=torch.long)
    loss = compute_losses(hidden, weight, None, labels, Recipe()).values / 2048
    (found,) = torch.autograd.grad(loss, weight)
    logits = functional.linear(hidden.float(), weight.float())
    (expected,) = torch.autograd.grad(functional.cross_entropy(logits, labels), weight)
    assert found.dtype == weight_type
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


def test_a_gradient_of_a_gradient_under_autocast() -> None:
    leaves = make_leaves()
    with torch.autocast("cpu", torch.bfloat16):
        loss = compute_losses(leaves[0].bfloat16(), leaves[1], leaves[2], LABELS, Recipe()).values
    (slope,) = torch.autograd.grad(loss, leaves[1], create_graph=True)
    slope.pow(2).sum().backward()
    assert leaves[0].grad is not None and leaves[0].grad.isfinite().all()


def test_only_ignored_labels_give_what_torch_gives() -> None:
    labels = torch.full((21,), -100)
    ours = make_leaves()
    total = compute_losses(*ours, labels, Recipe()).values
    total.backward()
    assert total == 0 and all(not leaf.grad.any() for leaf in ours)


def test_auto_leaves_small_vocabularies_alone_and_takes_large_ones() -> None:
    small, large = build("llama"), build("llama", vocab_size=5000)
    for model, is_fused in ((small, False), (large, True)):
        RapidformerEngine(args={"log_level": "error", "lr": 0.1}).compose(model)
        ids = torch.arange(3, 27)[None]
        outputs = model(input_ids=ids, labels=ids)
        assert isinstance(outputs.logits, DeferredLogits) is is_fused


def test_on_is_refused_without_a_head() -> None:
    with pytest.raises(ConfigurationError, match="--fused-loss on: Linear has no linear head"):
        RapidformerEngine(args={"fused_loss": "on", "lr": 0.1}).compose(nn.Linear(2, 2))
