"""DeBERTa's attention in our form: its own results, padded, without padding and compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from rapidformer.accel.attention.disentangled import apply_disentangled, index_distances
from rapidformer.accel.compile.compilation import apply_compile
from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
from rapidformer.accel.unpad.rows import Rows
from rapidformer.accel.unpad.unpadding import apply_unpadding
from rapidformer.models.plan import find_plan
from rapidformer.overlay import get_fact

BOTH = {"pos_att_type": ["p2c", "c2p"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    # As version 3, with buckets for distances of 4 and more.
    "v3": ("deberta-v2", {**BOTH, "position_buckets": 8, "share_att_key": True,
                          "norm_rel_ebd": "layer_norm", "type_vocab_size": 0}),
    "v2, far tokens share a distance": ("deberta-v2", {**BOTH, "max_relative_positions": 5}),
    "v2, one direction": ("deberta-v2", {"pos_att_type": ["c2p"], "position_buckets": 8}),
    "v1": ("deberta", {**BOTH, "max_relative_positions": 12}),
}  # fmt: skip


def build(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    name, options = KINDS[kind]
    config = AutoConfig.for_model(
        name, vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=32, relative_attention=True, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.5,
        **options, **more,
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config)


def make_batch(labels: tuple[int, ...] = (0, 2, -1)) -> dict[str, torch.Tensor]:
    mask = torch.arange(21) < torch.tensor([21, 3, 14])[:, None]
    ids = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids * mask, "attention_mask": mask.long(), "labels": torch.tensor(labels),
    }  # fmt: skip


def run(model: Any, **batch: Any) -> dict[str, Any]:
    model.zero_grad()
    outputs = model(**batch)
    outputs.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": outputs.loss.detach(), "logits": outputs.logits.detach(), **found}


def check(model: Any, expected: dict[str, Any], **batch: Any) -> None:
    found = run(model, **batch)
    assert list(found) == list(expected)
    for name, value in found.items():
        scale = max(float(expected[name].abs().max()), 0.1)
        torch.testing.assert_close(value, expected[name], rtol=0, atol=5e-6 * scale, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_results(kind: str) -> None:
    model, batch = build(kind), make_batch()
    expected = run(model, **batch)
    apply_disentangled(model)
    check(model, expected, **batch)
    assert apply_unpadding(model, find_plan(model)) is None
    check(model, expected, **batch)


def test_every_token_of_a_padded_batch() -> None:
    model, batch = build("v3").deberta, make_batch()
    del batch["labels"]
    expected = model(**batch).last_hidden_state
    apply_disentangled(model)
    torch.testing.assert_close(model(**batch).last_hidden_state, expected, rtol=0, atol=1e-5)
    weights = model(**batch, output_attentions=True).attentions[0]
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(2, 21))


@pytest.mark.slow
def test_one_graph_for_all_lengths() -> None:
    model = build("v3")
    batches = [make_batch(), {n: v[:, 2:19] if v.dim() > 1 else v for n, v in make_batch().items()}]
    expected = [run(model, **batch) for batch in batches]
    apply_disentangled(model)
    assert apply_unpadding(model, find_plan(model), is_compiled=True) is None
    apply_compile(model, find_plan(model), backend="aot_eager")
    get_fact(model, CompiledBlocks).expect_other_sizes()
    for batch, theirs in zip(batches, expected, strict=True):
        check(model, theirs, **batch)
    compiled = get_fact(model, CompiledBlocks)
    assert (compiled.graphs, compiled.recompilations) == (1, 0)


def test_a_batch_without_labels() -> None:
    model, batch = build("v3"), make_batch((-1, -100, -1))
    expected = model(**batch).loss
    apply_disentangled(model)
    assert model(**batch).loss.item() == expected.item() == 0.0
    assert model(**batch, return_dict=False)[0].item() == 0.0


def test_distances_have_the_buckets_of_transformers() -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

    for size, buckets, longest in ((40, 8, 32), (700, 256, 512), (9, -1, 512)):
        tokens = torch.empty(1, size, 1)
        span = buckets if buckets > 0 else longest
        usual = build_relative_position(tokens, tokens, buckets, longest)[0]
        found = index_distances(size, buckets, longest, tokens.device)
        assert len(found) == 2 * size + 1
        # From the last token: to itself, and back to the first one.
        expected = torch.clamp(usual[-1].flip(0) + span, 0, 2 * span - 1)
        assert torch.equal(found[size : 2 * size], expected)
        expected = torch.clamp(usual[0] + span, 0, 2 * span - 1)
        assert torch.equal(found[1 : size + 1].flip(0), expected)


def test_attention_is_dropped_out() -> None:
    model = build("v3")
    apply_disentangled(model)
    model.deberta.encoder.layer[0].attention.self.dropout.p = 0.5
    model.train()
    one, other = (model(**make_batch()).logits for _ in range(2))
    assert not torch.equal(one, other)
    model.eval()
    one, other = (copy.deepcopy(model)(**make_batch()).logits for _ in range(2))
    assert torch.equal(one, other)


def test_few_sizes_for_graphs() -> None:
    """Of few rows, whose sum varies most, a quarter of a doubling; of many, an eighth."""

    def count(rows: int) -> int:
        sums = (torch.arange(1024, 2049, 32) // rows).tolist()
        masks = (torch.ones(rows, 2048 // rows) for _ in sums)
        real = [(m.cumsum(1) <= n).bool().numpy() for m, n in zip(masks, sums, strict=True)]
        return len({len(Rows.read_filled(each).places) for each in real})

    assert (count(8), count(16)) == (5, 9)
