"""Blocks on real tokens only, on a GPU: against the padded model in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)
from transformers.masking_utils import bidirectional_mask_function

from rapidformer.accel.cache import skip_cache_in_training
from rapidformer.accel.host_masks import make_masks_from_host
from rapidformer.accel.unpad import kernels, masks, row_attention
from rapidformer.accel.unpad.kernels import make_row_mask
from rapidformer.accel.unpad.rows import Rows
from rapidformer.accel.unpad.unpadding import apply_unpadding
from rapidformer.data.batch import move_to_device
from rapidformer.models.plan import find_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SMALL: dict[str, Any] = {
    "vocab_size": 200, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 256, "max_position_embeddings": 128, "n_embd": 128, "n_layer": 3,
    "n_head": 4, "n_positions": 128, "num_key_value_heads": 2, "pad_token_id": 0,
    "sliding_window": 16, "local_attention": 16, "global_attn_every_n_layers": 2,
}  # fmt: skip
PAIR: dict[str, Any] = {
    "d_model": 128, "d_kv": 32, "d_ff": 256, "num_heads": 4, "num_layers": 3, "encoder_layers": 3,
    "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "decoder_start_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "bert": AutoModelForMaskedLM,
    "modernbert": AutoModelForMaskedLM,
    "gpt2": AutoModelForCausalLM,
    "llama": AutoModelForCausalLM,
    "mistral": AutoModelForCausalLM,
}
LENGTHS = [64, 9, 33, 1, 50]
TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of the largest gradient of a tensor; the padded model in 16 bits is as far from fp32.
LIMITS = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}


def build(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    model = MODELS[kind].from_config(AutoConfig.for_model(kind, **(SMALL | more)))
    return model.cuda().eval()


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(5, 200, mask.shape, generator=generator).masked_fill(~mask, 0)
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}
    return {name: value.cuda() for name, value in batch.items()}


def run(model: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
        outputs = model(**(batch := make_batch()))
    outputs.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits = outputs.logits[batch["attention_mask"].bool()].detach()
    return {**found, "loss": outputs.loss.detach(), "logits": logits}


@pytest.mark.parametrize("kernel", ["attend_with_flash", "attend_by_row"])
@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("kind", MODELS)
def test_loss_logits_and_gradients(
    kind: str, precision: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, dtype = build(kind), TYPES[precision]
    expected = run(model, None)
    assert apply_unpadding(model, find_plan(model), dtype) is None
    used = []
    owner = kernels if kernel == "attend_with_flash" else row_attention
    if owner is kernels:
        monkeypatch.setattr(masks, "LONGEST_ON_GPU", 0)
    attend = getattr(owner, kernel)
    monkeypatch.setattr(owner, kernel, lambda *a, **k: used.append(1) or attend(*a, **k))
    found = run(model, dtype)
    assert len(used) == (0 if dtype is None else 3), "once per block"
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = (found[name] - value).abs().max()
        assert difference <= LIMITS[precision] * value.abs().max().clamp(min=1e-3), name


@pytest.mark.parametrize("precision", TYPES)
def test_values_that_are_smaller_than_queries(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latent attention of DeepSeek."""
    sizes = {
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "q_lora_rank": 32,
        "kv_lora_rank": 32, "first_k_dense_replace": 3, "num_key_value_heads": 4,
    }  # fmt: skip
    monkeypatch.setitem(MODELS, "deepseek_v3", AutoModelForCausalLM)
    model, dtype, used = build("deepseek_v3", **sizes), TYPES[precision], []
    expected = run(model, None)
    assert apply_unpadding(model, find_plan(model), dtype) is None
    attend = kernels.attend_with_flash
    monkeypatch.setattr(
        kernels, "attend_with_flash", lambda *a, **k: used.append(1) or attend(*a, **k)
    )
    found = run(model, dtype)
    assert len(used) == (0 if dtype is None else 3), "once per block"
    for name, value in expected.items():
        difference = (found[name] - value).abs().max()
        assert difference <= LIMITS[precision] * value.abs().max().clamp(min=1e-3), name


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_decoder_models_in_fp32(kind: str) -> None:
    config = AutoConfig.for_model(kind, **SMALL, **PAIR)
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config).cuda().eval()
    expected = run(model, None)
    assert apply_unpadding(model, find_plan(model)) is None
    for name, value in run(model, None).items():
        difference = (value - expected[name]).abs().max()
        assert difference <= LIMITS["fp32"] * expected[name].abs().max().clamp(min=1e-3), name


@pytest.mark.parametrize("longest", [0, 128], ids=["flash", "short rows"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_from_rows_to_an_encoders(
    dropout: float, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of queries attends to its own row of keys, which has another length."""
    monkeypatch.setattr(masks, "LONGEST_ON_GPU", longest)
    torch.manual_seed(0)
    mine, theirs = (
        torch.arange(64) < torch.tensor(each)[:, None] for each in ([5, 64, 1], [50, 7, 9])
    )
    rows, keys = (Rows.read(each.numpy(), torch.device("cuda")) for each in (mine, theirs))
    mask = make_row_mask(rows, bidirectional_mask_function, keys)
    query, key, value = (
        torch.randn(1, 4, tokens, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for tokens in (70, 66, 66)
    )
    call = kernels.Call(query, key, value, mask)
    assert call.takes_flash and call.takes_short_rows == (longest > 0)
    found = kernels.attend(query, key, value, mask, dropout=dropout)
    assert found.isfinite().all() and found.shape == (1, 70, 4, 32)
    if dropout:
        return
    wide = [each.detach().float().requires_grad_() for each in (query, key, value)]
    expected = kernels.attend_in_grid(kernels.Call(*wide, mask))
    direction = torch.randn_like(expected)
    for first, second in zip(
        (found, *torch.autograd.grad((found * direction).sum(), (query, key, value))),
        (expected, *torch.autograd.grad((expected * direction).sum(), wide)),
        strict=True,
    ):
        assert (first - second).abs().max() <= 3e-2 * second.abs().max()


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_recomputed_blocks(kind: str) -> None:
    from rapidformer.accel.recompute.blocks import apply_recompute

    # Recomputing needs training mode, so without dropout.
    model = build(kind, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    expected = run(model, None)
    apply_recompute(model, find_plan(model))
    assert apply_unpadding(model, find_plan(model), torch.bfloat16) is None
    model.train()
    for name, value in run(model, torch.bfloat16).items():
        difference = (value - expected[name]).abs().max()
        assert difference <= LIMITS["bf16"] * expected[name].abs().max().clamp(min=1e-3), name


def test_dropout_keeps_as_much_as_it_should() -> None:
    """With values of 1, attention sums the kept probabilities: 1 on average."""
    rows, p = 400, 0.3
    real = torch.ones(rows, 8, dtype=torch.bool)
    mask = make_row_mask(Rows.read(real.numpy(), torch.device("cuda")), bidirectional_mask_function)
    query, key = (torch.randn(1, 4, 8 * rows, 32, device="cuda").half() for _ in range(2))
    value = torch.ones_like(query)
    torch.manual_seed(3)
    first = kernels.attend(query, key, value, mask, dropout=p)
    second = kernels.attend(query, key, value, mask, dropout=p)
    torch.manual_seed(3)
    again = kernels.attend(query, key, value, mask, dropout=p)
    assert torch.equal(first, again) and not torch.equal(first, second)
    # 12,800 independent sums; each has a variance below p / (1 - p).
    deviation = (p / (1 - p) / first[..., 0].numel()) ** 0.5
    assert abs(first[..., 0].double().mean().item() - 1) < 5 * deviation + 1e-3
    assert first[..., 0].std() > 0.1


@pytest.mark.parametrize("size", [64, 128, 256])
def test_flash_attention_reads_causality_off_the_window(size: int) -> None:
    """The same bits as with its own argument, which would be a constant of a compiled graph."""
    torch.manual_seed(0)
    lengths = [1, 0, 200, 64, 300, 129]
    ends = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    leaves = [
        torch.randn(sum(lengths), heads, size, device="cuda").bfloat16().requires_grad_()
        for heads in (4, 2, 2)
    ]
    kernel, found = torch.ops.aten._flash_attention_forward, []
    # Its backward pass adds up gradients in any order otherwise.
    torch.use_deterministic_algorithms(True)
    for is_causal in (True, False):
        torch.manual_seed(1)
        output = kernel(
            *leaves, ends, ends, 300, 300, 0.1, is_causal, False, scale=None,
            window_size_left=-1, window_size_right=0,
        )[0]  # fmt: skip
        found.append([output, *torch.autograd.grad(output, leaves, torch.ones_like(output))])
    torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, *found))


def test_a_mask_that_is_read_off_the_gpu_has_no_window() -> None:
    allowed = torch.ones(2, 4, dtype=torch.bool, device="cuda")
    real = torch.ones(2, 4, dtype=torch.bool)
    rows = Rows.read(real.numpy(), torch.device("cuda"))
    assert make_row_mask(rows, lambda row, head, query, key: allowed[row, key]).window is None


@pytest.mark.parametrize("is_unpadded", [True, False])
@pytest.mark.parametrize("has_padding", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_a_step_does_not_wait_for_the_device(
    kind: str, has_padding: bool, is_unpadded: bool
) -> None:
    """Masks and labels are read from the host copies of the batch."""
    model = build(kind)
    skip_cache_in_training(model)
    make_masks_from_host(model)
    if is_unpadded:
        assert apply_unpadding(model, find_plan(model), torch.bfloat16) is None
    on_host = {name: value.cpu() for name, value in make_batch().items()}
    if not has_padding:
        on_host["attention_mask"].fill_(1)
    pinned = {name: value.pin_memory() for name, value in on_host.items()}
    batch = move_to_device(pinned, torch.device("cuda"))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        model(**batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(**batch).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_head_computes_labelled_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers only: against the padded model without a fused loss, loss and every gradient."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rapidformer import RapidformerEngine
    from rapidformer.accel.fused_loss import chunked

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=64,
    )  # fmt: skip
    ids = torch.randint(5, 8192, (4, 90))
    mask = (torch.arange(90) < torch.tensor([90, 40, 25, 12])[:, None]).long()
    labels = ids.masked_fill((torch.arange(90) < 8) | (mask == 0), -100)
    state = Qwen3ForCausalLM(config).state_dict()
    sizes: list[int] = []
    score = chunked._run_chunk
    monkeypatch.setattr(
        chunked,
        "_run_chunk",
        lambda logits, *a, **k: sizes.append(len(logits)) or score(logits, *a, **k),
    )
    found = []
    for is_on in (False, True):
        chosen: dict[str, Any] = {} if is_on else {"dynamic_shape": "off", "fused_loss": "off"}
        engine = RapidformerEngine(
            args={"mixed_precision": "bf16", "cuda_graph": "off", "lr": 1e-3, **chosen}
        )
        model = Qwen3ForCausalLM(config)
        model.load_state_dict(state)
        model, *_ = engine.compose(model=model)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        loss = model(**{name: value.cuda() for name, value in batch.items()}).loss
        engine.backward(loss)
        found.append([loss.detach().float(), *(p.grad.float() for p in model.parameters())])
        engine.close()
    assert sum(sizes) == int((labels[:, 1:] != -100).sum())
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm() <= 0.03 * theirs.norm() + 1e-6
