"""Operations on what a model returns without padding, beside the same on a padded tensor."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from rapidformer.accel.fused_loss import selection
from rapidformer.accel.unpad.calls import Call, Removal, record_padded
from rapidformer.accel.unpad.on_demand import Unpadded, lacks_padding, settle, start
from rapidformer.accel.unpad.rows import Rows
from rapidformer.errors import ConfigurationError

Loss = Callable[[Tensor, Tensor], Tensor]
LABELS = torch.tensor([[1, 2, 3, 0], [4, 5, 1, 2]])


def make(is_padded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Values that have a gradient, their mask, and the tensor that a model would return."""
    torch.manual_seed(0)
    values = torch.randn(2, 4, 6, requires_grad=True)
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[1, 2:] = False
    if is_padded:
        return values, mask, values * 1.0
    rows, block = Rows.read(mask.numpy()), nn.Identity()
    removal = Removal(is_trial=True)
    call = Call(removal, lambda: record_padded(block, values * 1.0), values.device)
    return values, mask, call.run(lambda: start(rows.pack(values * 1.0), rows, block))


def compare(loss: Loss) -> None:
    results: list[Any] = []
    for is_padded in (True, False):
        values, mask, hidden = make(is_padded)
        torch.manual_seed(1)
        total = settle(loss(hidden, mask))
        total.backward()
        results.append((total.detach(), values.grad))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)


def pair(mask: Tensor) -> Tensor:
    return mask[:, :, None] & mask[:, None, :]


def attend(x: Tensor) -> Tensor:
    """To what is no output of the model, so that only the queries may be NaN."""
    queries = x.unflatten(-1, (1, 6)).transpose(1, 2)
    keys, values = torch.zeros(2, 1, 4, 6), torch.ones(2, 1, 4, 6)
    return functional.scaled_dot_product_attention(queries, keys, values)


READ_NOTHING: dict[str, Loss] = {
    "pairs": lambda x, m: (x @ x.transpose(1, 2))[pair(m)].sum(),
    "differences": lambda x, m: ((x[:, :, None] - x[:, None]) ** 2).sum(-1)[pair(m)].sum(),
    "cosines": lambda x, m: functional.cosine_similarity(x[:, :, None], x[:, None], -1)[
        pair(m)
    ].sum(),
    "distances": lambda x, m: torch.cdist(x, x)[pair(m)].sum(),
    "products": lambda x, m: torch.cumprod(x, 1)[m].sum(),
    "entropy": lambda x, m: functional.binary_cross_entropy(
        torch.sigmoid(x), torch.zeros(2, 4, 6), reduction="none"
    )[m].sum(),
}
READ_PADDING: dict[str, Loss] = {
    "margins": lambda x, m: functional.multi_margin_loss(x.view(-1, 6), LABELS.view(-1)),
    "sorted": lambda x, m: torch.msort(x.view(-1, 6))[:3].sum(),
    "norms": lambda x, m: x.renorm(2, 1, 0.5)[m].sum(),
    "singular values": lambda x, m: torch.linalg.svdvals(x).sum(),
    "variance": lambda x, m: x.view(-1, 6).var(True),
    "largest": lambda x, m: torch.cdist(x, x, p=float("inf")).sum(),
    "attention": lambda x, m: attend(x).pow(2).sum(),
    "kinds": lambda x, m: x[:, 0].sum() * torch.unique(x.detach())[:5].sum(),
    "runs": lambda x, m: x[:, 0].sum() * len(torch.unique_consecutive((x.detach() > 0) * 1.0)),
    "polynomial": lambda x, m: (
        x[:, 0].sum() * torch.special.laguerre_polynomial_l(torch.ones(()), x.detach()).sum()
    ),
}
NAMED: dict[str, Loss] = {
    "factor": lambda x, m: torch.mul(x, other=2.0)[m].sum(),
    "matrix": lambda x, m: torch.matmul(x, other=torch.ones(6, 2))[m].sum(),
    "alpha": lambda x, m: torch.add(x, 2.0, x).sum(),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("name", READ_NOTHING)
def test_a_loss_that_masks_pairs_has_finite_gradients(name: str) -> None:
    compare(READ_NOTHING[name])


@pytest.mark.parametrize("name", READ_PADDING)
def test_an_operation_that_hides_or_refuses_nan_is_computed_with_padding(name: str) -> None:
    compare(READ_PADDING[name])


@pytest.mark.parametrize("name", NAMED)
def test_operands_may_be_named(name: str) -> None:
    compare(NAMED[name])


def test_gemmas_norm_runs_on_real_tokens_alone() -> None:
    (_, _, plain), (_, _, hidden) = make(is_padded=True), make(is_padded=False)
    norm = Gemma3RMSNorm(6)
    mine = norm(hidden)
    assert lacks_padding(mine)
    torch.testing.assert_close(mine[:, 0], norm(plain)[:, 0])


def overwrite(index: Any) -> Loss:
    def compute(x: Tensor, mask: Tensor) -> Tensor:
        x[index].zero_()
        return (x**2)[mask].sum() + x[:, 0].sum()

    return compute


WRITTEN: dict[str, Any] = {
    "first tokens": (slice(None), 0),
    "features of first tokens": (slice(None), 0, slice(2)),
    "a column with padding": (slice(None), 3),
    "a column without padding": (slice(None), 1),
    "a row": 0,
    "features": (..., slice(2)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_view_that_is_written_into_changes_the_output(name: str) -> None:
    compare(overwrite(WRITTEN[name]))


@pytest.mark.parametrize("name", ["first tokens", "features"])
def test_what_was_computed_before_a_write_is_not_computed_again_after_it(name: str) -> None:
    _, _, hidden = make(is_padded=False)
    before = hidden.exp()
    hidden[WRITTEN[name]].zero_()
    with pytest.raises(ConfigurationError, match="were changed in place since"):
        float(before.mean())


def test_an_output_prints_like_a_tensor() -> None:
    (_, _, plain), (_, _, hidden) = make(is_padded=True), make(is_padded=False)
    assert isinstance(hidden[:, 1:].sum(), Unpadded)
    mine, theirs = hidden[:, 1:].sum() * 0, plain[:, 1:].sum() * 0
    assert repr(mine).partition(" grad_fn")[0] == repr(theirs).partition(" grad_fn")[0]


class Clock:
    updates = 0


def test_a_kept_output_does_not_keep_its_graph_after_the_step() -> None:
    clock, removal = Clock(), Removal()
    removal.clock = weakref.ref(clock)
    rows, block = Rows.read(torch.tensor([[True, True], [True, False]]).numpy()), nn.Identity()

    def run() -> Tensor:
        call = Call(removal, lambda: None, torch.device("cpu"))
        values = torch.randn(2, 2, 3, requires_grad=True)
        return call.run(lambda: start(rows.pack(values * 1.0), rows, block))

    hidden = run()
    kept, graph = hidden.detach(), weakref.ref(hidden)
    del hidden
    run()
    assert graph() is not None, "the step may still read padding"
    clock.updates += 1
    run()
    gc.collect()
    assert graph() is None
    assert torch.isfinite(kept[0]).all()


def test_an_output_can_be_copied() -> None:
    _, _, hidden = make(is_padded=False)
    assert isinstance(hidden, Unpadded)
    _, _, plain = make(is_padded=True)
    assert torch.equal(settle(copy.deepcopy(hidden.detach())), plain.detach())


def test_inputs_changed_in_place_since_are_an_error() -> None:
    ids = torch.tensor([[1, 2], [3, 0]])
    block, rows = nn.Identity(), Rows.read((ids > 0).numpy())
    values = ids.unsqueeze(-1).float()
    compute = functools.partial(lambda tokens: record_padded(block, tokens.unsqueeze(-1)), ids)
    call = Call(Removal(is_trial=True), compute, ids.device)
    hidden = call.run(lambda: start(rows.pack(values), rows, block))
    ids.zero_()
    with pytest.raises(ConfigurationError, match="inputs were changed in place since"):
        float(hidden.mean())


def test_labelled_tokens_are_found_without_waiting() -> None:
    labels = torch.tensor([-100, 7, -100, 3, -100, 5])
    find = selection._find_labelled
    assert find(labels, -100, 3).tolist() == [1, 3, 5]
    assert find(labels, -100, 4).tolist() == [1, 3, 5, 0], "places differ, and have no label"
    assert [find(labels, -100, bound) for bound in (None, 0, 6)] == [None] * 3
    with pytest.raises(RuntimeError, match="more labels than its batch"):
        find(labels, -100, 2)


CONVERSIONS: dict[str, Callable[[Tensor], Any]] = {
    "torch.tensor": torch.tensor,
    "new_tensor": lambda x: x.new_tensor(x),
    "another's new_tensor": lambda x: torch.ones(1).new_tensor(x),
    "torch.Tensor": lambda x: torch.Tensor(x.detach()),
    "torch.asarray": lambda x: torch.asarray(x, copy=True),
    "as_subclass": lambda x: x.as_subclass(Tensor),
    "numpy": lambda x: x.detach().numpy(),
    "asarray": lambda x: np.asarray(x.detach()),
    "tolist": lambda x: x.tolist(),
    "stack": lambda x: np.stack(list(x.detach())),
    "dlpack": lambda x: np.from_dlpack(x.detach()),
    "vmap": lambda x: torch.vmap(torch.sin)(x),
    "item": lambda x: x[1, 3, 0].item(),
}


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("name", CONVERSIONS)
def test_what_leaves_torch_functions_has_its_padding(name: str) -> None:
    """Constructors and vmap are not asked of a subclass, and would copy NaN without a word."""
    results = []
    for is_padded in (True, False):
        values, mask, hidden = make(is_padded)
        assert lacks_padding(hidden) != is_padded
        converted = CONVERSIONS[name](hidden)
        settle(hidden[mask].pow(2).sum()).backward()
        results.append((np.asarray(torch.as_tensor(converted).detach()), values.grad))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-6)
    torch.testing.assert_close(results[1][1], results[0][1])


@pytest.mark.parametrize("reduce", [torch.sum, torch.norm])
def test_gradients_that_leave_torch_functions_are_refused(reduce: Callable[..., Tensor]) -> None:
    """The gradient of a sum is one number, expanded."""
    _, _, hidden = make(is_padded=False)
    with pytest.raises(
        ConfigurationError, match=r"torch\.func \(vmap, grad\).*--dynamic-shape off"
    ):
        torch.vmap(reduce)(hidden).sum().backward()
