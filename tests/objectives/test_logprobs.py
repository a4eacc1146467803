"""Log-probabilities of labelled tokens: those of a plain loop in fp64, in chunks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from rapidformer import RapidformerEngine
from rapidformer.accel.fused_loss import chunked, layered
from rapidformer.accel.fused_loss.deferred import DeferredLogits
from rapidformer.accel.fused_loss.fused_loss import apply_fused_loss, find_head
from rapidformer.accel.fused_loss.scoring import score
from rapidformer.accel.unpad import on_demand
from rapidformer.objectives.logprobs import get_logits, get_token_logprobs, get_token_scores

WORDS, ROWS, LENGTH = 150, 4, 12


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunked, layered):
        monkeypatch.setattr(module, "choose_chunk", lambda rows, width, device: 8)


def build(kind: str = "llama", **given: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, **{"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32,
        "max_position_embeddings": 32, "pad_token_id": 0, "initializer_range": 0.3, **given},
    )  # fmt: skip
    make = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    return make.from_config(config).eval()


def make_batch() -> tuple[dict[str, Tensor], Tensor]:
    """Padding on the right, and a prompt without labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate((12, 5, 9, 3)):
        ids[row, length:], mask[row, length:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    return {"input_ids": ids, "attention_mask": mask}, labels


def compute_plainly(
    model: Any, *, is_shifted: bool = True, temperature: float = 1.0
) -> tuple[Tensor, Any]:
    """Log-probabilities and logits in fp64, and the model that has them."""
    exact = copy.deepcopy(model).double()
    inputs, labels = make_batch()
    logits = exact(**inputs).logits / temperature
    if is_shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    picked = picked.masked_fill(labels == -100, 0.0)
    return functional.pad(picked, (1, 0)) if is_shifted else picked, exact


def weigh(logprobs: Tensor) -> Tensor:
    """A loss with another gradient for each token."""
    factors = torch.linspace(-1, 2, logprobs.numel()).view(logprobs.shape)
    return (logprobs * factors).sum() + logprobs.sum(1).pow(2).mean()


def check_gradients(model: Any, exact: Any, tolerance: float = 2e-5) -> None:
    trained = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    largest = max(gradient.abs().max() for gradient in trained.values())
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(trained)
    for name, parameter in model.named_parameters():
        if name in trained:
            difference = (parameter.grad - trained[name]).abs().max()
            assert difference <= tolerance * largest, name


CASES: dict[str, Callable[[], Any]] = {
    "llama": build,
    "a soft cap": lambda: build("gemma2", final_logit_softcapping=3.0),
    "tied": lambda: build("mistral", tie_word_embeddings=True),
    "a bias": lambda: build("phi"),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("is_fused", [True, False])
def test_values_and_gradients(kind: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CASES[kind]()
    expected, exact = compute_plainly(model, temperature=0.7)
    if is_fused:
        apply_fused_loss(find_head(model))
        fail: Any = lambda self: pytest.fail("logits were computed")  # noqa: E731
        monkeypatch.setattr(DeferredLogits, "compute", fail)
    inputs, labels = make_batch()
    logprobs = get_token_logprobs(model, inputs, labels, temperature=0.7)
    assert logprobs.dtype == torch.float32 and logprobs.shape == labels.shape
    assert not logprobs[labels == -100].any()
    torch.testing.assert_close(logprobs, expected.float(), rtol=1e-5, atol=1e-5)
    weigh(logprobs).backward()
    weigh(expected).backward()
    check_gradients(model, exact)


def test_labels_of_their_own_positions() -> None:
    model = build("bert", type_vocab_size=1)
    expected, exact = compute_plainly(model, is_shifted=False)
    apply_fused_loss(find_head(model))
    logprobs = get_token_logprobs(model, *make_batch(), is_shifted=False)
    torch.testing.assert_close(logprobs, expected.float(), rtol=1e-5, atol=1e-5)
    weigh(logprobs).backward()
    weigh(expected).backward()
    check_gradients(model, exact)


@pytest.mark.parametrize("has_gradient", [True, False])
def test_statistics(has_gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[bool] = []

    def score_and_note(*args: Any, has_statistics: bool, **options: Any) -> Any:
        passes.append(has_statistics)
        return score(*args, has_statistics=has_statistics, **options)

    monkeypatch.setattr("rapidformer.accel.fused_loss.chunked.score", score_and_note)
    model = build()
    expected, exact = compute_plainly(model)
    apply_fused_loss(find_head(model))
    inputs, labels = make_batch()
    with nullcontext() if has_gradient else torch.no_grad():
        scores = get_token_scores(model, inputs, labels)
    assert scores.logprobs.requires_grad is has_gradient
    logits = functional.pad(exact(**inputs).logits[:, :-1], (0, 0, 1, 0)).float()
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    is_best = (logits.argmax(-1) == labels).float()
    for mine, plain in zip(scores, (expected, entropies, logits.mean(-1), is_best), strict=True):
        plain = plain.float().masked_fill(labels == -100, 0.0)
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)
    if has_gradient:
        weigh(scores.logprobs).backward()
        half = len(passes) // 2  # the gradient of the head takes a second pass, without them
        assert passes == [True] * half + [False] * half


def test_a_frozen_head_and_a_second_backward_pass() -> None:
    """A frozen head needs no second pass over the logits; both passes give the same gradients."""
    model = build()
    model.lm_head.weight.requires_grad_(False)
    expected, exact = compute_plainly(model)
    apply_fused_loss(find_head(model))
    loss = weigh(get_token_logprobs(model, *make_batch()))
    loss.backward(retain_graph=True)
    loss.backward()
    (2 * weigh(expected)).backward()
    check_gradients(model, exact)


def test_a_gradient_of_a_gradient() -> None:
    model = build()
    expected, exact = compute_plainly(model)
    apply_fused_loss(find_head(model))
    found = []
    for each, logprobs in ((model, get_token_logprobs(model, *make_batch())), (exact, expected)):
        (slope,) = torch.autograd.grad(weigh(logprobs), each.model.norm.weight, create_graph=True)
        found.append(torch.autograd.grad(slope.pow(2).sum(), each.lm_head.weight)[0])
    torch.testing.assert_close(found[0], found[1].float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("is_fused", [True, False])
def test_bf16_is_as_close_as_its_logits(is_fused: bool) -> None:
    """The arithmetic after the head is fp32: only weights and activations are rounded."""
    model = build().bfloat16()
    inputs, labels = make_batch()
    logits = model(**inputs).logits[:, :-1].double()
    picked = logits.log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None]).squeeze(-1)
    expected = functional.pad(picked.masked_fill(labels[:, 1:] == -100, 0.0), (1, 0))
    if is_fused:
        apply_fused_loss(find_head(model))
    logprobs = get_token_logprobs(model, inputs, labels)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected.float(), rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert model.lm_head.weight.grad.isfinite().all()


@pytest.mark.parametrize("settings", [{}, {"dynamic_shape": "off"}, {"fused_loss": "off"}])
def test_a_composed_model_leaves_padding_out(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without gradients, and nothing asks for what padding would give."""
    model = build()
    expected, exact = compute_plainly(model)
    RapidformerEngine(
        args={
            "log_level": "error",
            "lr": 0.1,
            "fused_loss": "on",
            "dynamic_shape": "on",
            **settings,
        }
    ).compose(model)
    model.eval()
    started = []
    start = on_demand.start
    monkeypatch.setattr(
        "rapidformer.accel.unpad.blocks.start", lambda *args: started.append(1) or start(*args)
    )
    monkeypatch.setattr(on_demand.Unpadded, "get_padded", lambda self: pytest.fail("padding"))
    logprobs = get_token_logprobs(model, *make_batch())
    weigh(logprobs).backward()
    weigh(expected).backward()
    torch.testing.assert_close(logprobs, expected.float(), rtol=1e-5, atol=1e-5)
    check_gradients(model, exact)
    with torch.no_grad():
        again = get_token_logprobs(model, *make_batch())
    torch.testing.assert_close(again, logprobs.detach(), rtol=1e-5, atol=1e-5)
    assert bool(started) is (settings.get("dynamic_shape") != "off")


def test_a_label_that_padding_predicts_keeps_padding() -> None:
    """As a bare model computes it, whatever that means."""
    model = build()
    inputs, labels = make_batch()
    labels = labels.clone()
    labels[3, 7] = 5
    plain = get_token_logprobs(model, inputs, labels).detach()
    settings = {"log_level": "error", "lr": 0.1, "fused_loss": "on", "dynamic_shape": "on"}
    RapidformerEngine(args=settings).compose(model)
    found = get_token_logprobs(model.eval(), inputs, labels)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    assert plain[3, 7] != 0


class Largest(TorchDispatchMode):
    """The most numbers of a tensor that an operation returns."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            # One value that is expanded takes no memory, nor does a tensor on the meta device.
            if isinstance(tensor, Tensor) and not tensor.is_meta and any(tensor.stride()):
                self.count = max(self.count, tensor.numel())
        return result


@contextmanager
def no_whole_logits(tokens: int, words: int) -> Iterator[None]:
    with Largest() as largest:
        yield
    assert 0 < largest.count < tokens * words / 2


def test_logits_of_all_tokens_never_exist() -> None:
    """Policy with its backward pass, and a reference that no engine has seen."""
    words = 5000
    model, reference = build(vocab_size=words), build(vocab_size=words)
    for parameter in model.lm_head.parameters():
        parameter.requires_grad_(False)  # its gradient is no logits, but as large as these few
    apply_fused_loss(find_head(model))
    ids = torch.arange(3, 67).view(1, 64)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with no_whole_logits(64, words):
        weigh(get_token_logprobs(model, inputs, ids)).backward()
    kind = type(reference.lm_head)
    with no_whole_logits(64, words), torch.no_grad():
        found = get_token_logprobs(reference, inputs, ids)
    assert type(reference.lm_head) is kind  # nothing stays on it
    logits = reference(**inputs).logits[:, :-1]
    plain = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(found[:, 1:], plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_adapters", [True, False])
def test_a_head_with_adapters_needs_no_whole_logits(has_adapters: bool) -> None:
    """Also without them, as the reference of a run is; in chunks, and with what is shown."""
    from peft import LoraConfig, inject_adapter_in_model

    words = 5000
    model = build(vocab_size=words)
    config = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    model = inject_adapter_in_model(config, model)
    model.lm_head.enable_adapters(has_adapters)
    model.model.norm.weight.requires_grad_(True)
    ids = torch.arange(3, 67).view(1, 64)
    labels = ids.masked_fill(ids < 9, -100)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    exact = copy.deepcopy(model)
    logits = exact(**inputs).logits[:, :-1]
    plain = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    plain = functional.pad(plain, (1, 0)).masked_fill(labels == -100, 0.0)
    kind = type(model.lm_head)
    with no_whole_logits(64, words):
        scores = get_token_scores(model, inputs, labels, temperature=0.5)
        weigh(get_token_logprobs(model, inputs, labels)).backward()
    assert type(model.lm_head) is kind  # nothing stays on it
    with torch.no_grad():
        found = get_token_logprobs(model, inputs, labels)
    torch.testing.assert_close(found, plain.detach(), rtol=1e-5, atol=1e-5)
    warm = (logits / 0.5).log_softmax(-1)
    entropies = -(warm.exp() * warm).sum(-1).masked_fill(labels[:, 1:] == -100, 0.0)
    torch.testing.assert_close(scores.entropies[:, 1:], entropies.detach(), rtol=1e-4, atol=1e-4)
    weigh(plain).backward()
    check_gradients(model, exact)


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda logits, labels: (
        -functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
            labels.shape
        )
    ),
    "log_softmax": lambda logits, labels: (
        logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    ),
    "torch.gather": lambda logits, labels: torch.gather(
        functional.log_softmax(logits.float() * 1.0, dim=-1), dim=2, index=labels.unsqueeze(2)
    ).squeeze(2),
}


@pytest.mark.parametrize("use", USES)
def test_a_users_own_log_probabilities_need_no_logits(
    use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    ids = make_batch()[0]["input_ids"]
    exact = copy.deepcopy(model).double()
    expected = USES["log_softmax"](exact(ids).logits[:, :-1], ids[:, 1:])
    apply_fused_loss(find_head(model))
    monkeypatch.setattr(DeferredLogits, "compute", lambda self: pytest.fail("logits were computed"))
    found = USES[use](model(ids).logits[:, :-1], ids[:, 1:])
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    weigh(found).backward()
    weigh(expected).backward()
    check_gradients(model, exact)


def test_log_probabilities_of_all_words_are_there_for_code_that_asks() -> None:
    model = build()
    inputs, labels = make_batch()
    expected = model(**inputs).logits.log_softmax(-1)
    apply_fused_loss(find_head(model))
    found = model(**inputs).logits.log_softmax(-1)
    assert isinstance(found, DeferredLogits)
    torch.testing.assert_close((found.exp() * found).sum(-1), (expected.exp() * expected).sum(-1))
    with torch.no_grad():
        assert isinstance(get_logits(model, inputs, labels), DeferredLogits)
        assert not isinstance(model(**inputs).logits, DeferredLogits)
