"""The mixture of experts against one that goes token by token, and what it promises to training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.models.gpt.experts import MixtureOfExperts, compute_balance_loss

from .small import make_config, make_model, make_tokens


def make_mixture(num_experts: int = 4, **options: object) -> MixtureOfExperts:
    torch.manual_seed(0)
    mixture = MixtureOfExperts(make_config(num_experts=num_experts, **options), num_experts)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixture


def mix_slowly(mixture: MixtureOfExperts, hidden: Tensor) -> Tensor:
    """Each token by itself, each of its experts by itself."""
    experts, outputs = mixture.experts, []
    for token in hidden.flatten(0, 1):
        probabilities = (mixture.router.weight @ token).softmax(0)
        chosen = probabilities.argsort(descending=True)[: mixture.top_k].tolist()
        total = sum(probabilities[i] for i in chosen) if mixture.top_k > 1 else 1.0
        output = torch.zeros_like(token)
        for i in chosen:
            inner = token @ experts.up[i]
            if experts.gate is None:
                inner = functional.gelu(inner, approximate="tanh")
            else:
                inner = functional.silu(token @ experts.gate[i]) * inner
            output = output + probabilities[i] / total * (inner @ experts.down[i])
        outputs.append(output)
    return torch.stack(outputs).view_as(hidden)


@pytest.mark.parametrize("swiglu", [False, True], ids=["gelu", "swiglu"])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_equals_the_slow_loop_in_outputs_and_gradients(top_k: int, swiglu: bool) -> None:
    mixture = make_mixture(moe_router_topk=top_k, swiglu=swiglu)
    results = []
    for mix in (lambda x: mixture(x)[0], lambda x: mix_slowly(mixture, x)):
        hidden = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(1))
        hidden.requires_grad_()
        mixture.zero_grad()
        output = mix(hidden)
        output.square().sum().backward()
        results.append([output, hidden.grad, *(p.grad for p in mixture.parameters())])
    for fast, slow in zip(*results, strict=True):
        assert fast.abs().max() > 1e-3
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4 * slow.abs().max().item())


def test_expert_without_tokens_gets_a_gradient_of_zeros() -> None:
    mixture = make_mixture(num_experts=8, moe_router_topk=1)
    hidden = torch.randn(1, 1, 32).expand(2, 5, 32)  # equal tokens all go to one expert
    output, _ = mixture(hidden)
    output.sum().backward()
    gradients = mixture.experts.up.grad
    assert gradients is not None and mixture.experts.down.grad is not None
    is_used = gradients.abs().amax(dim=(1, 2)) > 0
    assert is_used.sum() == 1
    assert mixture.router.weight.grad is not None


def test_balance_loss_is_one_for_even_and_the_number_of_experts_for_one_sided() -> None:
    even = torch.full((8, 4), 0.25)
    assert compute_balance_loss(even, torch.tensor([4, 8, 12, 16])).item() == pytest.approx(1.0)
    one_sided = functional.one_hot(torch.full((8,), 2), 4).float()
    assert compute_balance_loss(one_sided, torch.tensor([0, 0, 8, 8])).item() == pytest.approx(4.0)


def test_balance_loss_by_its_definition() -> None:
    mixture, hidden = make_mixture(), torch.randn(2, 9, 32)
    _, loss = mixture(hidden)
    probabilities = (hidden.flatten(0, 1) @ mixture.router.weight.T).softmax(-1)
    chosen = probabilities.topk(2).indices.flatten()
    shares = torch.tensor([(chosen == i).float().mean() for i in range(4)])
    torch.testing.assert_close(loss, 4 * (shares * probabilities.mean(0)).sum())
    assert loss.dtype is torch.float32 and loss.dim() == 0


def test_balance_loss_makes_the_router_even() -> None:
    mixture = make_mixture(num_experts=4, moe_router_topk=1)
    hidden = torch.randn(8, 32, 32) + 1.0
    optimizer = torch.optim.Adam(mixture.router.parameters(), lr=3e-2)
    first = loss = mixture(hidden)[1]
    for _ in range(40):
        optimizer.zero_grad()
        loss = mixture(hidden)[1]
        loss.backward()
        optimizer.step()
    assert first > 1.3
    assert loss < 1.05


def test_z_loss_is_added_so_that_one_coefficient_serves_both() -> None:
    hidden = torch.randn(2, 9, 32)
    plain, with_z = make_mixture(), make_mixture(moe_loss_coeff=0.02, moe_z_loss_coeff=0.001)
    logits = hidden.flatten(0, 1) @ plain.router.weight.T
    expected = 0.02 * plain(hidden)[1] + 0.001 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(0.02 * with_z(hidden)[1], expected)


def test_router_works_in_fp32_under_autocast() -> None:
    mixture, hidden = make_mixture(), torch.randn(2, 9, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, loss = mixture(hidden)
    assert torch.equal(loss, mixture(hidden)[1])
    assert output.dtype is hidden.dtype
    torch.testing.assert_close(output, mixture(hidden)[0], atol=0.2, rtol=0.1)


def test_same_bits_in_every_run() -> None:
    runs = []
    for _ in range(2):
        model, tokens = make_model(num_experts=8, moe_router_topk=3), make_tokens(rows=8)
        losses, *moe_losses = model(tokens, labels=tokens)
        (losses.mean() + sum(moe_losses)).backward()
        runs.append([losses, *moe_losses, *(p.grad for p in model.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("num_experts", "frequency", "expected"),
    [
        (None, 1, [1, 1, 1, 1]),
        (8, 1, [8, 8, 8, 8]),
        ([8], 2, [1, 8, 1, 8]),
        ([4, 8], 2, [1, 4, 1, 8]),
        ([4, 8, 1, 16], 1, [4, 8, 1, 16]),
        ([1], 1, [1, 1, 1, 1]),
        (8, 3, [1, 1, 8, 1]),
    ],
)
def test_which_layers_are_mixtures(
    num_experts: int | list[int] | None, frequency: int, expected: list[int]
) -> None:
    config = make_config(num_layers=4, num_experts=num_experts, moe_layer_freq=frequency)
    assert config.experts_per_layer == expected
    model = make_model(num_layers=4, num_experts=num_experts, moe_layer_freq=frequency)
    mixtures = [isinstance(layer.feed_forward, MixtureOfExperts) for layer in model.layers]
    assert mixtures == [count > 1 for count in expected]
    output = model(make_tokens(), labels=make_tokens())
    assert (len(output) - 1 if isinstance(output, tuple) else 0) == sum(mixtures)
