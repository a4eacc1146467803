"""A step never reads a value from the device: the host would wait until everything is computed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
    masking_utils,
)
from transformers.utils import import_utils

from rapidformer import RapidformerEngine
from rapidformer.accel import host_masks, parallelize, sliced_heads
from rapidformer.accel.cache import skip_cache_in_training
from rapidformer.accel.host_masks import ANSWERS, make_masks_from_host
from rapidformer.config.switches import get_switch
from rapidformer.overlay import list_layers
from rapidformer.training.callbacks import Callback, Control, RunningLoop
from tests.accel.test_unpad import PAIR, SMALL
from tests.gpu.test_unpad import MODELS as DECODERS_AND_ENCODERS
from tests.training.test_templates import LineFinetuner, make_engine

MODELS = {**DECODERS_AND_ENCODERS, "t5": AutoModelForSeq2SeqLM, "bart": AutoModelForSeq2SeqLM}
MASKS = {
    "ones": torch.ones(3, 8, dtype=torch.long),
    "padding": (torch.arange(8) < torch.tensor([8, 3, 5])[:, None]).long(),
}
READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default}


class Refusing(TorchDispatchMode):
    """Raises if a number is read from a tensor: ``.item()``, ``float()``, ``if tensor``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READS, f"{func} in a step"
        return func(*args, **(kwargs or {}))


class Watch(Callback):
    """Refuses reads from the begin of each step to the end of its update, but for the first."""

    def __init__(self) -> None:
        self.steps = 0
        self._mode: Refusing | None = None

    def on_step_begin(self, loop: RunningLoop, control: Control) -> None:
        if loop.step > 0:
            self._mode = Refusing()
            self._mode.__enter__()

    def on_optimizer_step(self, loop: RunningLoop, control: Control) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
            self.steps += 1


class ReadingFinetuner(LineFinetuner):
    def run_forward_step(self, batch: Any, model: Any) -> Any:
        loss = model(**batch)
        loss.item()
        return loss


class TextFinetuner(LineFinetuner):
    """Trains a small language model on padded batches, then on full ones."""

    kind = "llama"

    def train_valid_test_datasets_provider(self) -> Any:
        lengths = [8, 3, 5, 6] * 4 + [8] * 16
        rows = [list(range(5, 5 + length)) for length in lengths]
        return [{"input_ids": row, "labels": row} for row in rows], None, None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        return build(self.kind), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss


def build(kind: str) -> Any:
    more = PAIR if MODELS[kind] is AutoModelForSeq2SeqLM else {}
    config = AutoConfig.for_model(kind, **{**SMALL, **more})
    return MODELS[kind].from_config(config)


def train(finetuner: type[LineFinetuner], **settings: Any) -> int:
    engine = make_engine(
        global_batch_size=8, clip_grad=0.1, optimizer="adam", epochs=1, log_interval=100, **settings
    )
    watch = Watch()
    try:
        trainer = finetuner(engine)
        trainer.callbacks = [watch]
        trainer.train()
    finally:
        if watch._mode is not None:
            watch._mode.__exit__(None, None, None)
        engine.close()
    return watch.steps


def test_accumulating_clipping_and_updating_read_nothing() -> None:
    assert train(LineFinetuner) == 4


def test_a_read_in_the_forward_step_is_noticed() -> None:
    with pytest.raises(AssertionError, match=r"_local_scalar_dense.* in a step"):
        train(ReadingFinetuner)


@pytest.mark.parametrize(
    ("kind", "dynamic_shape"),
    [("llama", "auto"), ("llama", "off"), ("bert", "auto"), ("t5", "on"), ("t5", "off")],
)
def test_training_on_padded_and_full_batches_reads_nothing(kind: str, dynamic_shape: str) -> None:
    finetuner = type("Finetuner", (TextFinetuner,), {"kind": kind})
    assert train(finetuner, dynamic_shape=dynamic_shape, dataloader_type="single") == 3


@pytest.mark.parametrize("mask", [*MASKS, None])
@pytest.mark.parametrize("kind", MODELS)
def test_attention_masks_are_made_without_reading(
    kind: str, mask: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(kind).eval()  # in training, BART draws in host memory which layers to drop
    make_masks_from_host(model)
    skip_cache_in_training(model)
    ids = torch.arange(24).view(3, 8) + 5
    batch = {"input_ids": ids, "labels": ids, **({"attention_mask": MASKS[mask]} if mask else {})}
    # As on a device: the host knows the tensors of the batch, but not those made from them.
    known = {id(value): value for value in batch.values()}
    monkeypatch.setattr(host_masks, "find_host_copy", lambda tensor: known.get(id(tensor)))
    with Refusing():
        model(**batch).loss.backward()


HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"full_attn_idxs": [1], "intermediate_size": 32},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "num_experts": 2,
                   "num_experts_per_tok": 1, "moe_intermediate_size": 16,
                   "shared_expert_intermediate_size": 16,
                   "linear_num_key_heads": 2, "linear_num_value_heads": 2, "head_dim": 8,
                   "linear_key_head_dim": 4, "linear_value_head_dim": 4},
}  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", HYBRIDS)
def test_layers_that_mix_tokens_get_their_mask_without_reading(kind: str, mask: str) -> None:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16}
    config = AutoConfig.for_model(
        kind, vocab_size=64, num_hidden_layers=2, **sizes, **HYBRIDS[kind]
    )
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.arange(24).view(3, 8) + 5
    batch = {"input_ids": ids, "labels": ids, "attention_mask": MASKS[mask], "use_cache": False}
    expected = model(**batch).loss
    make_masks_from_host(model)
    with Refusing():
        loss = model(**batch).loss
        loss.backward()
    assert torch.equal(loss.detach(), expected.detach())


def test_whisper_makes_its_mask_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its decoder makes positions, a row for each sample, which transformers would look at."""
    config = WhisperConfig(
        vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8,
        max_source_positions=10, max_target_positions=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config).eval()  # in training, it draws on the host
    batch = {"input_features": torch.randn(3, 8, 20), "labels": torch.arange(24).view(3, 8) + 5}
    batch["use_cache"] = False  # as in training
    expected = model(**batch).loss
    make_masks_from_host(model)
    monkeypatch.setattr(host_masks, "find_host_copy", lambda tensor: None)  # all on the device
    with Refusing():
        loss = model(**batch).loss
        loss.backward()
    assert torch.equal(loss.detach(), expected.detach())


@pytest.mark.parametrize("mask", [*MASKS, None])
@pytest.mark.parametrize("kind", MODELS)
def test_attention_gets_the_same_masks_while_a_cuda_graph_is_recorded(
    kind: str, mask: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise what is recorded differs from what was tried and compiled before."""
    model = build(kind).eval()
    make_masks_from_host(model)
    ids = torch.arange(24).view(3, 8) + 5
    batch = {"input_ids": ids, "labels": ids, **({"attention_mask": MASKS[mask]} if mask else {})}
    known = {id(value): value for value in batch.values()}
    monkeypatch.setattr(host_masks, "find_host_copy", lambda tensor: known.get(id(tensor)))
    attend, calls = torch.nn.functional.scaled_dot_product_attention, []

    def listen(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((kwargs.get("attn_mask"), kwargs.get("is_causal")))
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", listen)
    model(**batch, use_cache=False)
    before, calls[:] = list(calls), []
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    model(**batch, use_cache=False)
    assert before
    for (was, was_causal), (found, is_causal) in zip(before, calls, strict=True):
        assert is_causal == was_causal
        assert torch.equal(found, was) if isinstance(found, torch.Tensor) else found is was


@pytest.mark.parametrize(
    "form", [{"new_decoder_architecture": True, "num_kv_heads": 2}, {"multi_query": True}], ids=str
)
def test_falcon_takes_its_heads_without_lists(form: dict[str, Any]) -> None:
    """torch copies a list to the device and waits for it; a tensor that indexes is one of those."""

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func is torch.ops.aten.index.Tensor
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("falcon", **sizes, **{"new_decoder_architecture": False, **form})
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(16).view(2, 8)
    results = []
    for _ in range(2):
        with Counting() as counting:
            outputs = model(input_ids=ids, labels=ids, use_cache=False)
        gradients = torch.autograd.grad(outputs.loss, list(model.parameters()))
        results.append((counting.count, outputs.logits, *gradients))
        sliced_heads.apply(SimpleNamespace(model=model))
    assert [count for count, *_ in results] == [4, 0]
    for before, after in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(after, before)


def test_falcons_heads_are_sliced_in_rows_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both change its attention, and one of them must come first."""
    row = get_switch("sliced heads")
    changed = replace(row, devices=("cuda", "cpu"))
    rows = [changed if other is row else other for other in parallelize.SWITCHES]
    monkeypatch.setattr(parallelize, "SWITCHES", rows)
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("falcon", **sizes))
    engine = RapidformerEngine(args={"save": "none"})
    engine.compose(model, torch.optim.AdamW(model.parameters()))
    attention = next(m for m in model.modules() if "Attention" in type(m).__name__)
    assert [layer for layer in list_layers(attention) if layer in ("heads", "unpad")] == [
        "heads",
        "unpad",
    ]
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_for_eager_attention_copy_no_numbers_to_the_device(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"batch_size": 3, "q_length": 8, "kv_length": 8, "dtype": dtype}
    padding = MASKS["padding"].bool()
    expected = masking_utils.eager_mask(**sizes, attention_mask=padding)
    monkeypatch.delattr(torch, "tensor")
    with ANSWERS:
        build_mask = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["eager"]
        found = build_mask(**sizes, attention_mask=padding)
    assert found.dtype is dtype and torch.equal(found, expected)


def test_a_mask_that_only_the_device_knows_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    make_masks_from_host(model)
    monkeypatch.setattr(host_masks, "find_host_copy", lambda _: None)
    ids = torch.arange(24).view(3, 8) + 5
    with Refusing(), pytest.raises(AssertionError, match="in a step"):
        model(ids, attention_mask=MASKS["ones"])
    # Positions that were given may start again anywhere.
    positions = torch.arange(8).expand(3, 8)
    with Refusing(), pytest.raises(AssertionError, match="in a step"):
        model(ids, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("positions", [torch.arange(8)[None], (torch.arange(8) % 4)[None]])
def test_one_row_of_positions_for_the_whole_batch_is_not_read(
    positions: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    make_masks_from_host(model)
    ids = torch.arange(24).view(3, 8) + 5
    expected = model(ids, position_ids=positions.repeat(3, 1), use_cache=False).logits
    known = {id(each): each for each in (ids, positions)}
    monkeypatch.setattr(host_masks, "find_host_copy", lambda tensor: known.get(id(tensor)))
    with Refusing():
        found = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, expected)


class Restarting(torch.nn.Module):
    """Code of a user that packs two texts into each row."""

    def __init__(self) -> None:
        super().__init__()
        self.body = build("llama")

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.body(input_ids, position_ids=(torch.arange(8) % 4)[None], use_cache=False)


def test_positions_that_a_users_model_makes_may_start_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Restarting()
    ids = torch.arange(24).view(3, 8) + 5
    expected = model(input_ids=ids).logits
    make_masks_from_host(model)
    monkeypatch.setattr(host_masks, "find_host_copy", lambda _: None)
    assert torch.equal(model(input_ids=ids).logits, expected)


def test_a_traced_model_is_not_bound_to_the_padding_of_its_example() -> None:
    model = build("llama").requires_grad_(False)
    make_masks_from_host(model)
    ids = torch.arange(24).view(3, 8) + 5

    def run(mask: torch.Tensor) -> Any:
        return model(ids, attention_mask=mask, use_cache=False).logits

    # Padding on the left: causal attention would see it.
    padded = MASKS["padding"].flip(1)
    traced = torch.jit.trace(run, (MASKS["ones"],), check_trace=False)
    assert torch.allclose(traced(padded), run(padded))


def test_a_models_gradients_for_each_row_can_be_taken() -> None:
    model = build("llama")
    make_masks_from_host(model)

    def run(weights: Any, row: torch.Tensor) -> torch.Tensor:
        settings = {"position_ids": torch.arange(8)[None], "use_cache": False}
        output = torch.func.functional_call(model, weights, (row[None],), settings)
        return output.logits.sum()

    weights = dict(model.named_parameters())
    rows = torch.arange(24).view(3, 8) + 5
    found = torch.func.vmap(torch.func.grad(run), in_dims=(None, 0))(weights, rows)
    one = torch.func.grad(run)(weights, rows[1])
    for name, value in one.items():
        assert torch.allclose(found[name][1], value, atol=1e-6)


def test_the_host_answers_as_the_device_would() -> None:
    with ANSWERS:
        check_answers()


def check_answers() -> None:
    causal, both, packed = (
        getattr(masking_utils, name)
        for name in (
            "_ignore_causal_mask_sdpa",
            "_ignore_bidirectional_mask_sdpa",
            "find_packed_sequence_indices",
        )
    )
    for mask, window in itertools.product((*MASKS.values(), None), (None, 8, 9)):
        real = None if mask is None else mask.bool()
        for length in (8, 3):
            given = (real, length, 8, 8 - length, 0, window)
            assert causal(*given) == causal.__wrapped__(*given)
        assert both(real, 8, window) == both.__wrapped__(real, 8, window)
    restarting = torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 6, 7, 8, 9]])
    assert torch.equal(packed(restarting), packed.__wrapped__(restarting))
    assert packed(restarting[1:]) is None
