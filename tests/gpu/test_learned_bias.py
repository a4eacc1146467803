"""Attention with a learned bias: the kernel against fp64, and T5 with it against T5 without."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import T5Config, T5ForConditionalGeneration

from rapidformer.accel.attention.kernel_order import apply_bias_layout
from rapidformer.accel.attention.kernel_scope import KernelChoice, apply_choice
from rapidformer.accel.attention.learned_bias import interface, operator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not interface.fits(torch.device("cuda")),
        reason="needs a CUDA GPU like Hopper, and Triton",
    ),
]
BATCH, HEADS = 2, 4


def make(
    queries: int, keys: int, size: int, dtype: torch.dtype, rows: int = 1, batch: int = BATCH
) -> tuple[list[Tensor], Tensor]:
    """Query, key, value and bias; the gradient of the output."""
    torch.manual_seed(0)

    def draw(tokens: int, width: float) -> Tensor:
        drawn = torch.randn(batch, tokens, HEADS, size, device="cuda") * width
        return drawn.to(dtype).transpose(1, 2)

    bias = torch.randn(rows, HEADS, queries, keys, device="cuda").to(dtype)
    leaves = [draw(queries, 0.3), draw(keys, 0.3), draw(keys, 1.0), bias]
    return [leaf.requires_grad_() for leaf in leaves], draw(queries, 1.0)


def differentiate(output: Tensor, leaves: list[Tensor], gradient: Tensor) -> list[Tensor]:
    return [output, *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]


def compute_exactly(
    leaves: list[Tensor], gradient: Tensor, factor: Tensor | float = 1.0, *, is_causal: bool = False
) -> list[Tensor]:
    """Output and gradients in fp64; ``factor`` is what dropout multiplies the weights by."""
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    query, key, value, bias = wide
    scores = query @ key.mT + bias
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return differentiate(scores.softmax(-1) * factor @ value, wide, gradient)


def get_errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [
        float((mine.double() - exact).norm() / exact.norm())
        for mine, exact in zip(found, expected, strict=True)
    ]


def test_the_trial_succeeds_and_draws_no_random_number() -> None:
    before = torch.cuda.get_rng_state()
    interface.can_run.cache_clear()
    assert interface.can_run(torch.device("cuda"))
    assert torch.equal(torch.cuda.get_rng_state(), before)


# Every case compiles its own kernels, which takes seconds.
@pytest.mark.parametrize(
    ("dtype", "size", "is_causal"),
    [(torch.bfloat16, 128, False), (torch.bfloat16, 128, True), (torch.float16, 16, False)],
)
def test_values_are_as_close_to_fp64_as_those_of_torch(
    dtype: torch.dtype, size: int, is_causal: bool
) -> None:
    leaves, gradient = make(256, 256, size, dtype)
    output = operator.attend(*leaves, dropout=0.0, scale=1.0, is_causal=is_causal)
    bias = leaves[3].expand(BATCH, -1, -1, -1)
    if is_causal:
        seen = torch.ones(256, 256, dtype=torch.bool, device="cuda").tril()
        bias = torch.where(seen, bias, torch.finfo(dtype).min)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        theirs = functional.scaled_dot_product_attention(*leaves[:3], attn_mask=bias, scale=1.0)
    exact = compute_exactly(leaves, gradient, is_causal=is_causal)
    mine = get_errors(differentiate(output, leaves, gradient), exact)
    errors = get_errors(differentiate(theirs, leaves, gradient), exact)
    assert all(a <= 1.1 * b for a, b in zip(mine, errors, strict=True)), (mine, errors)


@pytest.mark.parametrize(
    ("dtype", "size", "queries", "keys", "rows", "is_causal"),
    [(torch.bfloat16, 64, 77, 203, 1, False), (torch.float16, 32, 77, 77, BATCH, True)],
)
def test_lengths_that_do_not_fill_a_tile(
    dtype: torch.dtype, size: int, queries: int, keys: int, rows: int, is_causal: bool
) -> None:
    leaves, gradient = make(queries, keys, size, dtype, rows)
    output = operator.attend(*leaves, dropout=0.0, scale=1.0, is_causal=is_causal)
    exact = compute_exactly(leaves, gradient, is_causal=is_causal)
    errors = get_errors(differentiate(output, leaves, gradient), exact)
    assert max(errors) < torch.finfo(dtype).eps / 2, errors


def test_other_lengths_and_batches_compile_no_kernel_again(
    compilations: list[str],
) -> None:
    def run(batch: int, tokens: int) -> None:
        leaves, gradient = make(tokens, tokens, 64, torch.bfloat16, batch=batch)
        seen = torch.ones(batch, 1, 1, tokens, dtype=torch.bool, device="cuda")
        output = operator.attend(*leaves, seen, dropout=0.1, scale=1.0, is_causal=False)
        differentiate(output, leaves, gradient)

    run(2, 64)
    compilations.clear()
    for batch, tokens in ((2, 512), (1, 64), (3, 77), (16, 20), (1, 1), (2, 600)):
        run(batch, tokens)
    assert compilations == []


@pytest.mark.parametrize("shape", [(BATCH, HEADS, 70, 45), (1, 1, 70, 45)])
def test_an_expanded_mask(shape: tuple[int, ...]) -> None:
    leaves, gradient = make(70, 45, 64, torch.bfloat16)
    given = torch.rand(BATCH, 1, 1, 45, device="cuda") > 0.3
    narrow = given if shape[0] > 1 else given[:1]
    found = [
        differentiate(
            operator.attend(*leaves, seen, dropout=0.0, scale=1.0, is_causal=False),
            leaves,
            gradient,
        )
        for seen in (narrow, narrow.expand(shape))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def unpack(kept: Tensor, shape: torch.Size) -> Tensor:
    """The bits of dropout as [batch, heads, queries, keys]."""
    bits = torch.arange(8, dtype=torch.uint8, device=kept.device).view(8, 1)
    spread = (kept.view(*shape[:3], -1, 1, 64) >> bits) & 1
    return spread.flatten(3)[..., : shape[3]]


@pytest.mark.parametrize(("keys", "dropout"), [(512, 0.1), (700, 0.5)])
def test_dropout_drops_as_often_as_asked_and_the_same_in_the_backward_pass(
    keys: int, dropout: float
) -> None:
    leaves, gradient = make(256, keys, 64, torch.bfloat16)
    shape = torch.Size((BATCH, HEADS, 256, keys))
    seed = torch.tensor([11], device="cuda")
    kept = operator._draw(seed, shape[:3].numel(), keys, dropout)
    bits = unpack(kept, shape).double()
    spread = (dropout * (1 - dropout)) ** 0.5
    assert abs(float(bits.mean()) - (1 - dropout)) < 5 * spread / shape.numel() ** 0.5
    assert float((bits.mean((0, 1, 2)) - (1 - dropout)).abs().max()) < 5 * spread / 2048**0.5
    # Neighbours are drawn independently of each other.
    both = (bits[..., 1:] * bits[..., :-1]).mean()
    assert abs(float(both) - (1 - dropout) ** 2) < 5e-3
    output = operator._attend(*leaves, None, kept, dropout, 1.0, False)[0]
    expected = compute_exactly(leaves, gradient, bits / (1 - dropout))
    assert max(get_errors(differentiate(output, leaves, gradient), expected)) < 1e-2


def test_dropout_comes_from_the_generator_and_is_recomputed() -> None:
    leaves, gradient = make(130, 130, 64, torch.bfloat16)

    def attend(*parts: Tensor) -> Tensor:
        return operator.attend(*parts, dropout=0.1, scale=1.0, is_causal=True)

    found = []
    for run in (attend, attend, lambda *parts: checkpoint(attend, *parts, use_reentrant=False)):
        torch.manual_seed(3)
        found.append(differentiate(run(*leaves), leaves, gradient))
    other = attend(*leaves)
    assert all(torch.equal(a, b) for run in found[1:] for a, b in zip(found[0], run, strict=True))
    assert not torch.equal(other, found[0][0])


@pytest.mark.parametrize("lowest", [torch.finfo(torch.bfloat16).min, -math.inf])
def test_rows_without_a_visible_key_stay_finite(lowest: float) -> None:
    leaves, gradient = make(70, 70, 64, torch.bfloat16)
    with torch.no_grad():
        leaves[3][..., 5, :] = lowest
        leaves[3][..., 6, ::2] = lowest
    output = operator.attend(*leaves, dropout=0.0, scale=1.0, is_causal=False)
    found = differentiate(output, leaves, gradient)
    assert all(bool(each.isfinite().all()) for each in found)
    if math.isinf(lowest):
        assert not bool(output[:, :, 5].any())
    else:
        assert max(get_errors(found, compute_exactly(leaves, gradient))) < 1e-2


@pytest.mark.parametrize("queries", [1, 130])
def test_hidden_keys_give_the_bias_no_gradient(queries: int) -> None:
    leaves, gradient = make(130, 200, 64, torch.bfloat16)
    seen = torch.rand(BATCH, 1, queries, 200, device="cuda") > 0.3
    seen[0, :, -1] = False  # not one visible key
    output = operator.attend(*leaves, seen, dropout=0.0, scale=1.0, is_causal=False)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    query, key, value, bias = wide
    hidden = torch.where(seen, bias, torch.finfo(torch.bfloat16).min)
    exact = (query @ key.mT + hidden).softmax(-1) @ value
    expected = differentiate(exact, wide, gradient)
    assert max(get_errors(differentiate(output, leaves, gradient), expected)) < 1e-2


def build_t5(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=64, d_kv=32, d_ff=128, num_heads=2, num_layers=2,
        dropout_rate=dropout, decoder_start_token_id=0,
    )  # fmt: skip
    model: nn.Module = T5ForConditionalGeneration(config).cuda().train()
    apply_bias_layout(model)
    return model


def train(model: Any, *, is_padded: bool, is_compiled: bool = False) -> dict[str, Tensor]:
    """The gradients of a batch."""
    torch.manual_seed(1)
    ids = torch.randint(1, 64, (3, 40), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    if is_padded:
        mask = torch.ones_like(ids)
        mask[0, 25:] = 0
        batch |= {"attention_mask": mask, "decoder_attention_mask": mask}
    if is_compiled:
        for block in (*model.encoder.block, *model.decoder.block):
            block.compile(fullgraph=True)
    model.zero_grad()
    with torch.autocast("cuda", torch.float16):  # rounds less than bf16
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize(
    ("is_padded", "is_compiled"), [(False, False), (True, False), (True, True)]
)
def test_t5_has_the_same_gradients(
    is_padded: bool, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(build_t5(0.0), is_padded=is_padded)
    calls = []
    attend = interface.attend
    monkeypatch.setattr(interface, "attend", lambda *a, **o: calls.append(0) or attend(*a, **o))
    model = build_t5(0.0)
    order = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    apply_choice(model, [], KernelChoice(order, has_bias_kernel=True))
    found = train(model, is_padded=is_padded, is_compiled=is_compiled)
    assert calls  # traced or run
    for name, gradient in expected.items():
        difference = (found[name] - gradient).norm() / gradient.norm()
        assert difference < 2e-2, name
