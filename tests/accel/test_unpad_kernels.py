"""Every way to attend within rows gives what attention row by row gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import masking_utils as masks

from rapidformer.accel.unpad import kernels
from rapidformer.accel.unpad import masks as row_masks
from rapidformer.accel.unpad.kernels import make_row_mask
from rapidformer.accel.unpad.masks import RowMask, fuse
from rapidformer.accel.unpad.rows import Rows, round_up
from rapidformer.compat.torch_compile import count_graphs
from rapidformer.data.batch import get_host_copy, move_to_device

MASKS = {
    "causal": masks.causal_mask_function,
    "full": masks.bidirectional_mask_function,
    "window": masks.sliding_window_causal_mask_function(3),
    "two-sided window": masks.sliding_window_bidirectional_mask_function(2),
}


def make_mask(kind: str, lengths: tuple[int, ...] = (5, 1, 7, 3)) -> RowMask:
    real = torch.arange(8) < torch.tensor(lengths)[:, None]
    return make_row_mask(Rows.read(real.numpy()), MASKS[kind])


def make_inputs(tokens: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    return [
        torch.randn(1, heads, tokens, 8, dtype=dtype, device=device, requires_grad=True)
        for heads in (4, 2, 2)
    ]


@pytest.mark.parametrize("kind", MASKS)
def test_rows_padded_for_attention_alone(kind: str) -> None:
    mask, inputs = make_mask(kind), make_inputs(16)
    expected = kernels.attend(*inputs, mask, scaling=0.3)
    found = kernels.attend_in_grid(kernels.Call(*inputs, mask, 0.0, 0.3))
    direction = torch.randn_like(expected)
    for mine, theirs in zip(
        (found, *torch.autograd.grad((found * direction).sum(), inputs)),
        (expected, *torch.autograd.grad((expected * direction).sum(), inputs)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "window"),
    [("causal", (-1, 0)), ("full", (-1, -1)), ("window", (2, 0)), ("two-sided window", (1, 1))],
)
def test_the_window_of_a_mask(kind: str, window: tuple[int, int]) -> None:
    found = make_mask(kind).window
    if kind == "two-sided window":  # transformers has changed by one what the number means
        assert found is not None and found[0] == found[1] in (1, 2)
    else:
        assert found == window


def test_no_window_fits_every_mask() -> None:
    chunks = masks.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.long))
    assert make_row_mask(make_mask("full").rows, chunks).window is None
    holes = torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1]]).bool().numpy()
    sliding = MASKS["window"]
    assert make_row_mask(Rows.read(holes), sliding).window is None, "columns tell, not neighbours"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", MASKS)
def test_shapes_and_types_of_flash_attention(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: the operator's own rules, checked by tensors without values."""
    monkeypatch.setattr(kernels, "get_largest_head", lambda device: 256)
    inputs = make_inputs(16, dtype, device="meta")
    found = kernels.attend(*inputs, make_mask(kind), dropout=0.1, scaling=0.3)
    assert found.shape == (1, 16, 4, 8) and found.dtype == dtype
    gradients = torch.autograd.grad(found.sum(), inputs)
    assert [each.shape for each in gradients] == [each.shape for each in inputs]


@pytest.mark.slow
def test_a_graph_of_flash_attention_takes_any_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced with both passes."""
    monkeypatch.setattr(row_masks, "get_largest_head", lambda device: 256)
    torch._dynamo.reset()
    compiled = torch.compile(kernels.attend, backend="aot_eager", dynamic=True, fullgraph=True)
    inputs, before = make_inputs(16, torch.bfloat16, device="meta"), count_graphs()
    for kind in MASKS:
        mask = fuse(make_mask(kind))
        assert mask.fused is not None
        ends, keys = mask.fused.ends.to("meta"), mask.fused.key_ends.to("meta")
        mask = replace(mask, fused=replace(mask.fused, ends=ends, key_ends=keys))
        found = compiled(*inputs, mask, scaling=0.3)
        torch.autograd.grad(found.sum(), inputs)
    assert count_graphs() - before == 1
    torch._dynamo.reset()


def test_flash_attention_takes_values_up_to_the_size_of_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of multi-head latent attention are smaller, and get zeros, which come back as zeros."""
    query, _, value = make_inputs(16, torch.bfloat16)
    assert kernels.takes_flash(query, value, 256)
    assert kernels.takes_flash(query, value[..., :4], 256)
    assert not kernels.takes_flash(query, torch.cat([value, value], -1), 256)
    assert not kernels.takes_flash(query.float(), value, 256)
    seen = []

    def attend(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        seen.append(value)
        return 2 * value

    monkeypatch.setattr(kernels, "attend_with_flash", attend)
    call = kernels.Call(query, query, value[..., :4], make_mask("causal"))
    output = kernels._attend_with_flash(call)
    assert seen[0].shape[-1] == query.shape[-1]
    assert not seen[0][..., 4:].any()
    torch.testing.assert_close(output[0], 2 * call.flatten()[2])


def test_masks_and_labels_are_read_without_waiting_for_the_device() -> None:
    batch = {"attention_mask": torch.ones(2, 3), "labels": torch.tensor([[1, 2], [3, -100]])}
    moved = move_to_device(batch, torch.device("meta"))
    batch["labels"].numpy().fill(7)  # the loader's next batch
    assert get_host_copy(moved["labels"]).tolist() == [[1, 2], [3, -100]]
    replaced = move_to_device(batch, torch.device("meta"))
    replaced["labels"].data = torch.empty_like(replaced["labels"])
    moved["labels"].mul_(2)
    for outdated in (moved, replaced):  # the host's copy is that of the batch before
        with pytest.raises(NotImplementedError, match="meta"):
            get_host_copy(outdated["labels"])


@pytest.mark.parametrize("kind", MASKS)
def test_the_operator_of_compiled_blocks(kind: str) -> None:
    mask, inputs = make_mask(kind), make_inputs(16)
    expected = kernels.attend(*inputs, mask, scaling=0.3)
    found = kernels.attend(*inputs, fuse(mask), scaling=0.3)
    direction = torch.randn_like(expected)
    for mine, theirs in zip(
        (found, *torch.autograd.grad((found * direction).sum(), inputs)),
        (expected, *torch.autograd.grad((expected * direction).sum(), inputs)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_the_operator_with_values_of_another_size() -> None:
    mask, (query, key, value) = make_mask("causal"), make_inputs(16)
    inputs = (query, key, value[..., :5])
    expected = kernels.attend(*inputs, mask)
    found = kernels.attend(*inputs, fuse(mask))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(each.square().sum(), value)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_the_operator_from_a_decoder_to_an_encoder() -> None:
    """With a bias, and rows whose counts differ after rounding: some have queries or keys alone."""
    full, (query, key, value) = masks.bidirectional_mask_function, make_inputs(64)
    bias = torch.randn(1, 4, 128, 128, requires_grad=True)
    reals = [torch.arange(8) < torch.tensor(each)[:, None] for each in ((2, 1, 3), (5, 8, 7))]
    rows, keys = (Rows.read(real, rounds_up=True) for real in reals)
    keys.extend_ends(rows)
    found = kernels.attend(query, key, value, make_row_mask(rows, full, keys), position_bias=bias)
    mask = make_row_mask(Rows.read(reals[0]), full, Rows.read(reals[1]))
    real = (query[:, :, :6], key[:, :, :20], value[:, :, :20])
    expected = kernels.attend(*real, mask, position_bias=bias[:, :, :3, :8])
    direction, inputs = torch.randn_like(expected), (query, key, value, bias)
    for mine, theirs in zip(
        (found[:, :6], *torch.autograd.grad((found[:, :6] * direction).sum(), inputs)),
        (expected, *torch.autograd.grad((expected * direction).sum(), inputs)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_the_operators_gradient_with_dropout() -> None:
    """Against finite differences: its backward pass must draw what its forward pass drew."""
    inputs = [tensor.double().detach().requires_grad_() for tensor in make_inputs(5)]
    mask = fuse(make_mask("causal", (3, 2)))
    direction = torch.randn(1, 5, 4, 8).double()

    def run(*given: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return (kernels.attend(*given, mask, dropout=0.4).double() * direction).sum()

    gradients = torch.autograd.grad(run(*inputs), inputs)
    for place, gradient in enumerate(gradients):
        step = torch.randn_like(inputs[place]) * 1e-2
        moved = [
            run(*(t + sign * step if i == place else t for i, t in enumerate(inputs))).item()
            for sign in (1, -1)
        ]
        expected = (moved[0] - moved[1]) / 2
        assert abs((gradient * step).sum().item() - expected) < 1e-3 * max(1, abs(expected))


@pytest.mark.parametrize("tokens", [1, 64, 65, 1000, 1025, 4001, 100_000])
def test_token_counts_are_rounded_to_a_few_sizes(tokens: int) -> None:
    size = round_up(tokens)
    assert size % 64 == 0 and tokens <= size <= max(64, tokens * 1.125 + 1, tokens + 63)
    assert len({round_up(n) for n in range(1024, 2048)}) == 9
