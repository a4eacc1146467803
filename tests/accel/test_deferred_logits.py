"""Whatever a loss does with deferred logits, it gets the loss and gradients of ordinary ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rapidformer.accel.fused_loss.deferred import DeferredLogits
from rapidformer.accel.fused_loss.fused_loss import apply_fused_loss
from rapidformer.compat.torch_dispatch import HAS_PYTHON_APPLY
from rapidformer.compat.torch_optimizers import has_hooks
from rapidformer.errors import ConfigurationError

ROWS, TOKENS, WIDTH, WORDS = 3, 7, 8, 37
_RANDOM = torch.Generator().manual_seed(0)
INPUTS = torch.randn(ROWS, TOKENS, WIDTH, generator=_RANDOM)
TARGETS = torch.randint(0, WORDS, (ROWS, TOKENS), generator=_RANDOM)
LABELS = torch.where(torch.rand(ROWS, TOKENS, generator=_RANDOM) < 0.2, -100, TARGETS)
NEXT = LABELS[:, 1:]
MASK = torch.rand(ROWS, TOKENS, WORDS, generator=_RANDOM) < 0.1
PROBABILITIES = torch.rand(ROWS * TOKENS, WORDS, generator=_RANDOM).softmax(-1)

Use = Callable[[Any], Any]
USES: dict[str, Use] = {}


def use(function: Use) -> Use:
    USES[function.__name__] = function
    return function


def measure(logits: Tensor, labels: Tensor = LABELS, **options: Any) -> Tensor:
    return functional.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1), **options)


# ---- in place, with views taken before -----------------------------------------------------------


@use
def temperature_after_shift(logits: Tensor) -> Tensor:
    shifted = logits[..., :-1, :]
    logits /= 1.7
    return measure(shifted, NEXT)


@use
def in_place_on_a_view(logits: Tensor) -> Tensor:
    shifted = logits[..., :-1, :]
    shifted /= 3
    return measure(logits)


@use
def in_place_on_a_view_of_a_view(logits: Tensor) -> Tensor:
    some = logits.view(-1, WORDS)[::2]
    logits.add_(1)
    some.mul_(2)
    return measure(logits) + measure(some, LABELS.reshape(-1)[::2])


@use
def copies_keep_their_values(logits: Tensor) -> Any:
    flat = logits[:, :-1].reshape(-1, WORDS)
    shifted = logits[:, 1:].contiguous()
    doubled, wide = logits * 2, logits.to(torch.float32, copy=True)
    logits.mul_(3)
    wide.div_(5)
    return sum(map(measure, (flat, shifted, doubled, wide), (NEXT, NEXT, LABELS, LABELS)))


def change_words(logits: Tensor) -> None:
    logits[..., 3] = -5.0


def change_masked(logits: Tensor) -> None:
    logits[MASK] = -3.0


def change_without_gradient(logits: Tensor) -> None:
    with torch.no_grad():
        logits.mul_(2)


def change_into(logits: Tensor) -> None:
    with torch.no_grad():
        torch.mul(logits.detach().clone(), 2.0, out=logits)


def change_data(logits: Tensor) -> None:
    logits.data.mul_(2)


def replace_data(logits: Tensor) -> None:
    logits.data = logits.detach() * 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "set_words": change_words,
    "set_masked": change_masked,
    "without_gradient": change_without_gradient,
    "out": change_into,
    "data": change_data,
    "new_data": replace_data,
    "masked_fill": lambda logits: logits.masked_fill_(MASK, -3.0),
    "fill_selected": lambda logits: logits[:, :, 5].fill_(-4.0),
    "detach": lambda logits: logits.detach().mul_(2),
    "relu": lambda logits: functional.relu(logits, inplace=True),
    "float": lambda logits: logits.float().mul_(2),
    "chunk": lambda logits: logits.detach().chunk(2, 1)[0].mul_(2),
    "unbind": lambda logits: logits.detach().unbind(0)[1].mul_(2),
    "split": lambda logits: logits.detach().split([5, WORDS - 5], -1)[1].mul_(2),
}


def build_change(change: Callable[[Any], Any]) -> Use:
    def compute(logits: Tensor) -> Tensor:
        flat = logits.view(-1, WORDS)
        change(logits)
        return measure(flat) + measure(logits)

    return compute


USES |= {f"in_place_{name}": build_change(change) for name, change in CHANGES.items()}

# ---- other losses --------------------------------------------------------------------------------

USES |= {
    "softmax_and_loss": lambda x: measure(x) + x.softmax(-1).pow(2).sum(),
    "two_losses": lambda x: measure(x) + measure(x[:, :-1], NEXT),
    "z_loss": lambda x: measure(x.float()) + 1e-2 * x.float().logsumexp(-1).pow(2).mean(),
    "row_by_row": lambda x: sum(map(measure, x, LABELS)),
    "label_smoothing": lambda x: measure(x, label_smoothing=0.1),
    "class_weights": lambda x: measure(x, weight=torch.linspace(0.5, 2, WORDS)),
    "ignore_index": lambda x: measure(x, TARGETS, ignore_index=int(TARGETS[0, 0])),
    "no_reduction": lambda x: measure(x, reduction="none").dot(torch.linspace(0, 1, 21)),
    "soft_targets": lambda x: functional.cross_entropy(x.view(-1, WORDS), PROBABILITIES),
    "transposed": lambda x: functional.cross_entropy(x.transpose(1, 2), LABELS),
    "module": lambda x: nn.CrossEntropyLoss(reduction="sum")(x.flatten(0, 1), LABELS.flatten()),
    "compiled": lambda x: torch.compile(measure, backend="eager")(x),
    "checkpointed": lambda x: checkpoint(
        lambda y: measure(y) + y.logsumexp(-1).mean(), x, use_reentrant=False
    ),
}  # fmt: skip


@use
def parts_without_gradient(logits: Tensor) -> Any:
    with torch.no_grad():
        flat, doubled = logits.view(-1, WORDS), logits * 2
    with torch.inference_mode():
        logits[:, 1:].argmax(-1)
    return sum(measure(x) + x.logsumexp(-1).mean() for x in (logits, flat, doubled))


# ---- custom autograd functions -------------------------------------------------------------------


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        logits: Tensor
        (logits,) = ctx.saved_tensors
        return 2 * logits * gradient


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / 2


class DoubleInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.mark_dirty(logits)
        return logits.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


sum_squares = Squares.apply
"""Kept before the switch is applied, as scripts do."""

USES |= {
    "function": lambda x: measure(x) + Squares.apply(x),  # type: ignore[no-untyped-call]
    "function_of_a_view": lambda x: measure(x) + Squares.apply(x[:, :-1]),  # type: ignore[no-untyped-call]
    "identity_function": lambda x: measure(HalfGradient.apply(x)),  # type: ignore[no-untyped-call]
}


@use
def in_place_function(logits: Tensor) -> Tensor:
    flat = logits.view(-1, WORDS)
    DoubleInPlace.apply(logits)  # type: ignore[no-untyped-call]
    return measure(flat)


# ---- runs ----------------------------------------------------------------------------------------


class Model(nn.Module):
    """Its hidden states are transposed: their strides are not those of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inner(inputs.transpose(0, 1)).tanh().transpose(0, 1)
        logits: Tensor = self.head(hidden)
        return logits


def build(is_fused: bool, is_frozen: bool = False) -> Model:
    torch.manual_seed(0)
    model = Model()
    model.inner.requires_grad_(not is_frozen)
    if is_fused:
        apply_fused_loss(model.head)
    return model


@pytest.mark.parametrize("use", USES)
def test_every_use(use: str) -> None:
    found = []
    for is_frozen in (False, True):
        for is_fused in (False, True):
            model = build(is_fused, is_frozen)
            logits = model(INPUTS)
            assert isinstance(logits, DeferredLogits) is is_fused and logits.requires_grad
            loss = USES[use](logits)
            trained = [p for p in model.parameters() if p.requires_grad]
            found.append([loss, *torch.autograd.grad(loss, trained)])
    for expected, mine in (found[:2], found[2:]):
        for theirs, ours in zip(expected, mine, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize(
    "convert",
    [
        torch.tensor, torch.ones(1).new_tensor, torch.vmap(torch.sin),
        lambda logits: torch.asarray(logits, copy=True),
        lambda logits: torch.Tensor(logits.detach()),
    ],
)  # fmt: skip
def test_what_is_not_asked_of_a_subclass_gets_the_logits(convert: Any) -> None:
    results = []
    for is_fused in (False, True):
        model = build(is_fused)
        logits = model(INPUTS)
        converted = convert(logits).detach()
        logits.pow(2).sum().backward()
        results.append((converted, model.inner.weight.grad))
    for expected, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)


def test_a_function_stored_before_the_switch_is_followed_or_refused() -> None:
    """torch 2.15 calls it without asking us, so the gradient is refused: never wrong."""
    gradients = []
    for is_fused in (False, True):
        model = build(is_fused)
        loss = sum_squares(model(INPUTS))
        if is_fused and not HAS_PYTHON_APPLY:
            with pytest.raises(ConfigurationError, match=r"Pass it a copy, outputs\.logits\.clone"):
                loss.backward()
            return
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_function_that_needs_all_logits_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Reported(Squares):
        pass

    logits = build(is_fused=True)(INPUTS)
    with caplog.at_level("INFO", logger="rapidformer"):
        Reported.apply(logits)  # type: ignore[no-untyped-call]
        Reported.apply(logits[:, :-1])  # type: ignore[no-untyped-call]
    assert caplog.text.count("Reported, a torch.autograd.Function, needs all logits") == 1


@pytest.mark.parametrize("is_fused", [False, True])
def test_what_a_gradient_needs_must_not_change(is_fused: bool) -> None:
    soft = build(is_fused)(INPUTS).tanh()
    soft[:, 0] += 1  # the gradient of tanh is computed from its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        measure(soft).backward()


def test_what_would_differ_is_refused() -> None:
    model = build(is_fused=True)
    logits = model(INPUTS)
    losses = torch.vmap(lambda x, y: functional.cross_entropy(x, y))(logits, TARGETS)
    # The gradient of a sum is one number, expanded, like the zero that we send ourselves.
    for used in (losses, torch.vmap(torch.sum)(model(INPUTS))):
        with pytest.raises(ConfigurationError, match=r"func \(vmap, grad\).*logits\.clone\(\)"):
            used.sum().backward()
    logits = model(INPUTS)
    loss = measure(logits)
    with pytest.raises(ConfigurationError, match="gradient of the logits was asked for"):
        torch.autograd.grad(loss, logits, allow_unused=True)
    loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not has_hooks(optimizer), "a step may still be replayed by a CUDA graph"
    optimizer.step()
    with pytest.raises(ConfigurationError, match="by an optimizer step for example"):
        logits.argmax(-1)


def test_weights_that_change_through_data_are_noticed() -> None:
    """As in FGM and SAM: torch counts no such change, and the logits were of the new weights."""
    model = build(is_fused=True)
    logits = model(INPUTS)
    measure(logits).backward()
    weight = model.head.weight
    assert weight.grad is not None and weight.grad.sum(0).abs().max() < 1e-6, "rows cancel"
    kept = weight.data.clone()
    assert torch.equal(model(INPUTS), model(INPUTS)), "to look is no change"
    weight.data.add_(weight.grad, alpha=0.1)
    with pytest.raises(ConfigurationError, match=r"had changed, .*Ask before"):
        logits.argmax(-1)
    weight.data.copy_(kept)
    torch.testing.assert_close(logits.clone(), build(is_fused=False)(INPUTS))
    assert "data" in vars(nn.Parameter)
