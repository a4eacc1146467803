"""Divergences of two models' predictions: known values, and gradients of a plain fp64 version."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.accel.fused_loss import chunked
from rapidformer.accel.fused_loss.deferred import DeferredLogits
from rapidformer.accel.fused_loss.fused_loss import apply_fused_loss, find_head
from rapidformer.errors import TrainingError
from rapidformer.objectives.divergence import sum_divergences
from rapidformer.objectives.logprobs import get_logits
from tests.objectives.test_logprobs import build, check_gradients, make_batch, no_whole_logits

BETAS = (0.0, 0.1, 0.5, 1.0)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "choose_chunk", lambda rows, width, device: 8)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [(0.0, 0.0920328502), (1.0, 0.0851228260), (0.5, 0.0219011790), (0.1, 0.0081847558)],
)
def test_known_values(beta: float, expected: float) -> None:
    student, teacher = (torch.tensor([[p]]).log() for p in ((0.7, 0.2, 0.1), (0.5, 0.3, 0.2)))
    sums = sum_divergences(student, teacher, torch.tensor([[1]]), beta=beta, is_shifted=False)
    assert sums.loss.item() == pytest.approx(expected, abs=1e-7)
    assert sums.divergence.item() == sums.loss.item() and sums.label_loss == 0


def diverge_plainly(student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """Token by token; words that only one of them has are left out."""
    common = min(student.shape[-1], teacher.shape[-1])
    log_s = (student[..., :common] / temperature).log_softmax(-1)
    log_t = (teacher[..., :common] / temperature).log_softmax(-1)
    if beta in (0.0, 1.0):
        one, other = (log_t, log_s) if beta == 0 else (log_s, log_t)
        return (one.exp() * (one - other)).sum(-1)
    log_m = (beta * log_t.exp() + (1 - beta) * log_s.exp()).log()
    of_teacher = (log_t.exp() * (log_t - log_m)).sum(-1)
    return beta * of_teacher + (1 - beta) * (log_s.exp() * (log_s - log_m)).sum(-1)


def build_pair(words: int = 150, teacher_words: int = 150) -> tuple[Any, Any]:
    teacher = build("gemma2", final_logit_softcapping=4.0, vocab_size=teacher_words)
    return build(vocab_size=words), teacher


@pytest.mark.parametrize(
    ("beta", "words"),
    [*((beta, (150, 150)) for beta in BETAS), (0.5, (150, 160)), (0.0, (160, 150))],
)
def test_values_and_gradients(beta: float, words: tuple[int, int], monkeypatch: Any) -> None:
    student, teacher = build_pair(*words)
    inputs, labels = make_batch()
    exact = build(vocab_size=words[0]).double()
    logits = exact(**inputs).logits[:, :-1]
    with torch.no_grad():
        others = teacher.double()(**inputs).logits[:, :-1]
        teacher = build_pair(*words)[1]
    is_labelled = labels[:, 1:] != -100
    expected = diverge_plainly(logits, others, beta, 1.5)[is_labelled].sum()
    of_labels = functional.cross_entropy(logits[is_labelled], labels[:, 1:][is_labelled])
    of_labels = of_labels * is_labelled.sum()
    (0.7 * expected + 0.3 * of_labels).backward()

    apply_fused_loss(find_head(student))
    apply_fused_loss(find_head(teacher))
    monkeypatch.setattr(DeferredLogits, "compute", lambda self: pytest.fail("logits were computed"))
    with torch.no_grad():
        of_teacher = get_logits(teacher, inputs, labels)
    sums = sum_divergences(
        get_logits(student, inputs, labels), of_teacher, labels,
        beta=beta, temperature=1.5, divergence_weight=0.7, label_weight=0.3,
    )  # fmt: skip
    torch.testing.assert_close(sums.divergence, expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.label_loss, of_labels.float(), rtol=1e-5, atol=1e-5)
    assert not sums.divergence.requires_grad
    sums.loss.backward()
    check_gradients(student, exact)


def test_whole_logits_give_the_same() -> None:
    student, teacher = build_pair()
    inputs, labels = make_batch()
    with torch.no_grad():
        others = teacher(**inputs).logits
    found = []
    for is_fused in (False, True):
        if is_fused:
            apply_fused_loss(find_head(student))
        student.zero_grad()
        logits = get_logits(student, inputs, labels)
        sums = sum_divergences(logits, others, labels, beta=0.5, label_weight=0.5)
        sums.loss.backward()
        found.append([*sums, student.lm_head.weight.grad.clone()])
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


def test_neither_head_computes_all_logits() -> None:
    words = 5000
    student, teacher = build(vocab_size=words), build(vocab_size=words)
    student.lm_head.weight.requires_grad_(False)
    apply_fused_loss(find_head(student))
    ids = torch.arange(3, 67).view(1, 64)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with no_whole_logits(64, words):
        with torch.no_grad():
            others = get_logits(teacher, inputs, ids)
        sum_divergences(get_logits(student, inputs, ids), others, ids, beta=0.5).loss.backward()


def test_a_gradient_of_a_gradient_is_refused() -> None:
    student, teacher = (torch.randn(1, 4, 5, requires_grad=True) for _ in range(2))
    loss = sum_divergences(student, teacher.detach(), torch.ones(1, 4).long(), beta=0.0).loss
    with pytest.raises(TrainingError, match="cannot pass through the divergence"):
        torch.autograd.grad(loss, student, create_graph=True)
