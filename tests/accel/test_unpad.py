"""Blocks on real tokens only: the same losses and gradients as with padding."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from rapidformer import Finetuner, RapidformerEngine
from rapidformer.accel.compile.compilation import apply_compile
from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
from rapidformer.accel.cuda_graph.columns import Filling
from rapidformer.accel.cuda_graph.inputs import read_fixed_rows
from rapidformer.accel.cuda_graph.trial_modes import FactorsForDropout
from rapidformer.accel.unpad import calls, kernels, proof
from rapidformer.accel.unpad.batches import (
    FixedRows,
    find_rows,
    fix_rows,
)
from rapidformer.accel.unpad.calls import Removal
from rapidformer.accel.unpad.proof import find_difference
from rapidformer.accel.unpad.sides import read_filled_sides
from rapidformer.accel.unpad.stirring import Steady, in_float64
from rapidformer.accel.unpad.unpadding import apply_unpadding
from rapidformer.models.own_loss import shifts_labels
from rapidformer.models.plan import LAYER_DROPS, find_plan
from rapidformer.overlay import get_fact, put_fact

SMALL: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64, "head_dim": 8, "n_embd": 16,
    "num_key_value_heads": 1, "n_layer": 3, "n_head": 2, "n_positions": 64, "ffn_dim": 32,
    "word_embed_proj_dim": 16, "dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 32,
    "pad_token_id": 0, "embedding_size": 16, "sliding_window": 4, "use_sliding_window": True,
    "global_attn_every_n_layers": 2, "decoder_start_token_id": 0, "local_attention": 4,
}  # fmt: skip
PAIR: dict[str, Any] = {
    "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout_rate": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
LANGUAGE = ["gpt2", "gpt_neox", "opt", "llama", "qwen3", "mistral", "phi3", "olmo2", "granite"]
OWN_ATTENTION: dict[str, dict[str, Any]] = {
    "gptj": {"rotary_dim": 4}, "bloom": {}, "mpt": PAIR, "falcon": {"alibi": True},
    "codegen": {"rotary_dim": 4, "n_head": 4, "n_embd": 32, "num_attention_heads": 4,
                "hidden_size": 32},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": {"attn_implementation": "eager"},
}  # fmt: skip
"""Kinds that multiply queries by keys in their own code, or were told to."""
MASKED = ["bert", "roberta", "electra", "distilbert", "modernbert", "xlm-roberta", "albert"]


def build(make: Any, kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**SMALL, **more}
    if kind == "falcon":  # there, it follows from the others
        del sizes["head_dim"]
    model = make.from_config(AutoConfig.for_model(kind, **sizes))
    return model.eval()  # without dropout, whose draws the two runs would not share


def make_batch(model: Any, labels: str = "tokens") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(11) < torch.tensor([11, 3, 6, 1])[:, None]
    ids = torch.randint(5, 60, (4, 11), generator=generator).masked_fill(~mask, 0)
    wanted = {
        "tokens": ids.masked_fill(~mask, -100),
        "kinds": (ids % 2).masked_fill(~mask, -100),
        "rows": torch.tensor([0, 1, 1, 0]),
    }
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": wanted[labels]}


def make_pair() -> dict[str, torch.Tensor]:
    """For an encoder-decoder model: 21 real tokens in, 24 out."""
    batch = make_batch(None)
    is_label = torch.arange(11) < torch.tensor([2, 11, 4, 7])[:, None]
    return {**batch, "labels": batch["input_ids"].roll(1, 0).clamp(min=5).where(is_label, -100)}


def run(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    outputs = model(**batch)
    outputs.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits = outputs.logits
    if logits.dim() == 3:
        logits = logits[batch["labels"] != -100]
    return {**found, "loss": outputs.loss.detach(), "logits": logits.detach()}


def check(model: Any, labels: str = "tokens") -> None:
    batch = make_batch(model, labels)
    expected = run(model, batch)
    assert apply_unpadding(model, find_plan(model)) is None
    shapes = []
    find_plan(model).get_blocks(model)[0].register_forward_hook(note := Note(shapes))
    found = run(model, batch)
    assert note.only_looks and {*shapes} == {(1, 21)}, "21 real tokens of 44"
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


class Note:
    """A hook that only looks: what the blocks compute on."""

    only_looks = True

    def __init__(self, shapes: list[Any]) -> None:
        self.shapes = shapes

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self.shapes.append(tuple(hidden.shape[:2]))


@pytest.mark.parametrize(("kind", "passes"), [("llama", 0), ("opt", 2)])
def test_passes_are_steadied_if_they_draw(
    kind: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPT draws for each block whether it is left out, at whatever rate."""
    entered: list[Steady] = []

    class Counted(Steady):
        def __enter__(self) -> Steady:
            entered.append(self)
            return super().__enter__()

    monkeypatch.setattr(proof, "Steady", Counted)
    model = build(AutoModelForCausalLM, kind)
    before = torch.get_rng_state()
    assert find_difference(model, find_plan(model), lambda batch: model(**batch)) is None
    assert len(entered) == passes
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", LANGUAGE)
def test_causal_models(kind: str) -> None:
    check(build(AutoModelForCausalLM, kind))


@pytest.mark.parametrize("kind", OWN_ATTENTION)
def test_models_that_compute_attention_themselves(kind: str) -> None:
    check(build(AutoModelForCausalLM, kind, **OWN_ATTENTION[kind]))


def test_padded_attention_of_a_block_that_is_run_again() -> None:
    """Its rows are known in the forward pass only, so such a block keeps its padding."""
    from rapidformer.accel.recompute.blocks import apply_recompute

    model = build(AutoModelForCausalLM, "bloom").train()
    expected = run(model, make_batch(model))
    assert apply_unpadding(model, find_plan(model)) is None
    model.gradient_checkpointing_enable()
    for name, value in run(model, make_batch(model)).items():
        assert torch.equal(value, expected[name])
    recomputed = build(AutoModelForCausalLM, "bloom")
    apply_recompute(recomputed, find_plan(recomputed))
    assert "needs sdpa" in str(apply_unpadding(recomputed, find_plan(recomputed)))


def test_in_fp64_code_of_a_model_sees_fp32_and_a_kernel_what_it_gets() -> None:
    def ask(asking: str) -> Any:
        names: dict[str, Any] = {"__name__": asking}
        exec("def ask(x): return x.dtype", names)
        return names["ask"]

    layer = torch.nn.Linear(2, 2)
    with in_float64(layer), FactorsForDropout():
        output = layer(torch.ones(1, 2, dtype=torch.float32).float())
        assert ask("my_model")(output) == torch.float32
        assert ask("triton.runtime.jit")(output) == torch.float64
        assert output.element_size() == 8
    assert layer.weight.dtype == torch.float32


def test_rounding_does_not_keep_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models amplify it: what differs in fp32 alone is rounding."""
    monkeypatch.setattr(proof, "_LIMIT", 1e-9)
    model = build(AutoModelForCausalLM, "gpt2")
    assert apply_unpadding(model, find_plan(model)) is None


def test_the_gradient_of_a_bias_of_keys_is_noise() -> None:
    """It is zero in theory, so only its size beside other gradients tells anything."""
    model = build(AutoModelForCausalLM, "opt", init_std=0.3)
    assert apply_unpadding(model, find_plan(model)) is None


@pytest.mark.parametrize("kind", MASKED)
def test_masked_models(kind: str) -> None:
    check(build(AutoModelForMaskedLM, kind))


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_classifiers(kind: str) -> None:
    check(build(AutoModelForSequenceClassification, kind), "rows")


@pytest.mark.parametrize(
    ("kind", "is_recomputed"), [("t5", False), ("t5", True), ("bart", False), ("pegasus", False)]
)
def test_encoder_decoder_models(kind: str, is_recomputed: bool) -> None:
    """Rows of other lengths on both sides, but as many columns: sizes do not tell the sides."""
    from rapidformer.accel.recompute.blocks import apply_recompute

    model = build(AutoModelForSeq2SeqLM, kind, **PAIR)
    expected = run(model, make_pair())
    if is_recomputed:
        apply_recompute(model, find_plan(model))
        model.train()
    assert apply_unpadding(model, find_plan(model)) is None
    shapes: list[Any] = []
    for block in find_plan(model).get_blocks(model):
        block.register_forward_hook(Note(shapes))
    for more in ({}, {"decoder_attention_mask": (make_pair()["labels"] != -100).long()}):
        shapes.clear()
        found = run(model, {**make_pair(), **more})
        assert {*shapes} == {(1, 21), (1, 24)}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["opt", "m2m_100"])
def test_blocks_that_are_skipped_by_chance(kind: str) -> None:
    """LayerDrop: any block may be the first or the last one of a pass."""
    is_pair = kind == "m2m_100"
    make = AutoModelForSeq2SeqLM if is_pair else AutoModelForCausalLM
    drops = dict.fromkeys(LAYER_DROPS, 0.5)
    dropouts = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    model = build(make, kind, **(PAIR if is_pair else {}), **drops, **dropouts).train()
    batch = make_pair() if is_pair else make_batch(model)

    def run_some() -> list[dict[str, torch.Tensor]]:
        torch.manual_seed(1)  # which blocks are skipped
        return [run(model, batch) for _ in range(6)]

    expected = run_some()
    assert apply_unpadding(model, find_plan(model)) is None
    shapes: list[Any] = []
    for block in find_plan(model).get_blocks(model):
        block.register_forward_hook(Note(shapes))
    for mine, theirs in zip(run_some(), expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert {*shapes} == {(1, 21), (1, 24)} if is_pair else {(1, 21)}
    assert len(shapes) < 6 * len(find_plan(model).blocks)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind in ("t5", "bart", "mistral") for layout in ("right", "left", "wide")]
    + [("bert", "right"), ("bert", "wide")],
)
def test_rows_of_a_graph_that_flash_attention_does_not_take(
    kind: str, layout: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens are put back at their places; one row may have as many tokens as columns."""
    monkeypatch.setattr(kernels, "_KERNELS", ((lambda call: True, kernels._attend_in_batch),))
    is_pair = kind in ("t5", "bart")
    make = AutoModelForSeq2SeqLM if is_pair else AutoModelForMaskedLM
    make = AutoModelForCausalLM if kind == "mistral" else make
    sizes = {**(PAIR if is_pair else {}), "max_position_embeddings": 128}
    model = build(make, kind, **sizes)
    batch = make_pair() if is_pair else make_batch(model)
    batch = {name: tensor[-count - 1 :][:count] for name, tensor in batch.items()}
    if layout == "wide":  # by more than the bound of a row's length
        fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        batch = {name: functional.pad(t, (0, 70), value=fills[name]) for name, t in batch.items()}
    elif layout == "left":
        batch |= {name: batch[name].flip(1) for name in ("input_ids", "attention_mask")}
        is_first = batch["attention_mask"].cumsum(1) < 2  # nothing predicts it
        batch |= {} if is_pair else {"labels": batch["input_ids"].masked_fill(is_first, -100)}
    expected = run(model, batch)
    plan = find_plan(model)
    assert apply_unpadding(model, plan) is None
    put_fact(model, Filling(fills=True, widens=False))
    mask = batch["attention_mask"]
    if is_pair:
        fixed = FixedRows(read_filled_sides(batch))
    else:
        fixed = read_fixed_rows(model, mask.bool().numpy(), batch["labels"])
    assert fixed.rows is not None
    tensors = [tensor for rows in fixed.rows.each for tensor in rows.tensors]
    fix_rows(mask, fixed._replace(rows=fixed.rows.fix(*tensors)))
    for name, value in run(model, batch).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_which_batches_of_an_encoder_decoder_model_stay_padded() -> None:
    model, batch = build(AutoModelForSeq2SeqLM, "t5", **PAIR), make_pair()
    assert find_rows(model, batch) is not None
    ones = torch.ones_like(batch["attention_mask"])
    with_gap, empty = batch["attention_mask"].clone(), batch["attention_mask"].clone()
    with_gap[0, 4] = 0
    empty[1] = 0
    for name, value in (
        ("attention_mask", with_gap), ("attention_mask", empty), ("use_cache", True),
        ("return_dict", False),
        ("labels", torch.tensor([0, 1, 1, 0])), ("decoder_attention_mask", ones[:, :5]),
        ("decoder_attention_mask", ones * 0), ("output_attentions", True),
    ):  # fmt: skip
        assert find_rows(model, {**batch, name: value}) is None, name


def test_a_cache_that_was_asked_for_has_all_columns() -> None:
    model = build(AutoModelForCausalLM, "llama", sliding_window=None)
    assert apply_unpadding(model, find_plan(model)) is None
    batch = make_batch(model)
    assert find_rows(model, batch) is not None
    cache = model(**batch, use_cache=True).past_key_values
    assert cache.layers[0].keys.shape[::2] == batch["input_ids"].shape


def test_a_loss_that_reads_an_encoders_padding_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(calls, "warn_once", lambda text, **_: said.append(text))
    model, reference = (build(AutoModelForSeq2SeqLM, "bart", **PAIR) for _ in range(2))
    assert apply_unpadding(model, find_plan(model)) is None
    shapes: list[Any] = []
    find_plan(model).get_blocks(model)[0].register_forward_hook(Note(shapes))
    model(**make_pair()).loss.backward()
    assert shapes == [(1, 21)] and not said
    for each in (model, reference):
        each.zero_grad()
        outputs = each(**make_pair())
        (outputs.loss + outputs.encoder_last_hidden_state.pow(3).mean()).backward()
    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6, msg=name)
    assert "step 1 reads what the model returns for padding" in said[0]


def test_token_classifiers() -> None:
    check(build(AutoModelForTokenClassification, "bert"), "kinds")


@pytest.mark.parametrize(
    ("make", "kind", "reason"),
    [
        (AutoModelForCausalLM, "mamba", "needs sdpa"),
    ],
)
def test_what_cannot_be_unpadded_is_left_as_it_is(make: Any, kind: str, reason: str) -> None:
    model = build(make, kind, num_labels=60)
    batch = make_batch(model)
    expected = run(model, batch)
    assert re.search(reason, apply_unpadding(model, find_plan(model)) or "none")
    for name, value in run(model, batch).items():
        assert torch.equal(value, expected[name])


def test_why_question_answering_stays_padded() -> None:
    model = build(AutoModelForQuestionAnswering, "bert", num_labels=2)
    assert "all positions of a row, padding included" in str(
        apply_unpadding(model, find_plan(model))
    )


@pytest.mark.parametrize("is_compiled", [False, True])
def test_recomputed_blocks_have_their_rows_too(is_compiled: bool) -> None:
    from rapidformer.accel.recompute.blocks import apply_recompute

    model = build(AutoModelForCausalLM, "llama")
    expected = run(model, make_batch(model))
    apply_recompute(model, find_plan(model))
    assert apply_unpadding(model, find_plan(model), is_compiled=is_compiled) is None
    model.train()
    for name, value in run(model, make_batch(model)).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("in_grid", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "llama4_text"])
def test_packed_examples_need_no_mask_of_all_pairs(
    kind: str, in_grid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4's masks look rows up: an example is not a row of the batch, as a GPU insists."""
    if in_grid:  # as on a GPU in fp32
        monkeypatch.setattr(kernels, "_KERNELS", ((lambda call: True, kernels.attend_in_grid),))
    more = {"attention_chunk_size": 64, "num_local_experts": 2, "intermediate_size_mlp": 32}
    model = build(AutoModelForCausalLM, kind, **more)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 60, (2, 18), generator=generator)
    positions = torch.tensor([[*range(9), *range(6), *range(3)], [*range(2), *range(16)]])
    labels = ids.masked_fill(positions == 0, -100)
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions, "use_cache": False}
    starts = (positions == 0).nonzero().tolist()
    alone = (
        sum(
            model(input_ids=cut, labels=cut, use_cache=False).loss * (cut.shape[1] - 1)
            for row, start in starts
            for cut in [ids[row : row + 1, start : _find_end(positions[row], start)]]
        )
        / (labels[:, 1:] != -100).sum()
    )
    alone.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    assert apply_unpadding(model, find_plan(model)) is None
    shapes: list[Any] = []
    find_plan(model).get_blocks(model)[0].register_forward_hook(Note(shapes))
    loss = model(**batch).loss
    loss.backward()
    assert shapes == [(1, 36)]
    torch.testing.assert_close(loss, alone.detach(), rtol=1e-6, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def _find_end(positions: torch.Tensor, start: int) -> int:
    later = [i for i in range(start + 1, len(positions)) if positions[i] == 0]
    return later[0] if later else len(positions)


def test_a_copy_of_a_model_has_nothing_of_a_call_whose_result_is_kept() -> None:
    model = build(AutoModelForMaskedLM, "bert", num_hidden_layers=1)
    assert apply_unpadding(model, find_plan(model)) is None
    mask = (torch.arange(9) < torch.tensor([9, 4])[:, None]).long()
    embedded = model.get_input_embeddings()(mask)  # copy.deepcopy refuses what was computed
    labels = mask.masked_fill(mask == 0, -100)
    kept = model(inputs_embeds=embedded, attention_mask=mask, labels=labels)
    assert get_fact(copy.deepcopy(model), Removal).has_removed
    kept.loss.backward()


@pytest.mark.slow
def test_compiled_blocks_settle() -> None:
    """Batches of any lengths: graphs for the first sizes, graphs for all others, then no more."""
    model = build(AutoModelForCausalLM, "llama", num_hidden_layers=2)
    reference, plan = copy.deepcopy(model), find_plan(model)
    apply_compile(model, plan, backend="eager")
    assert apply_unpadding(model, plan, is_compiled=True) is None
    compiled, counts = get_fact(model, CompiledBlocks), []
    for lengths in ([9, 4, 6], [31, 30, 28, 2], [30, 1, 2], [5, 3], [8, 7, 6, 5, 4]):
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        ids = torch.arange(5, 5 + mask.numel()).remainder(50).view(mask.shape)
        labels = ids.masked_fill(~mask, -100)
        batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
        batch["use_cache"] = False
        expected = run(reference, batch)
        for name, value in run(model, batch).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=name)
        counts.append(compiled.graphs)
    assert counts[0] == 1, "equal blocks share a graph"
    assert counts[1:] == [2] * 4, "the second size is the last to compile"
    assert compiled.recompilations == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "kind", "layers", "graphs"),
    [(AutoModelForCausalLM, "gemma3_text", ["sliding_attention", "full_attention"], 1),
     # Its first block has no norm before attention, so it is of another kind.
     (AutoModelForMaskedLM, "modernbert", ["full_attention", *["sliding_attention"] * 2,
                                           "full_attention"], 2)],
)  # fmt: skip
def test_blocks_share_a_graph_whatever_their_windows(
    make: Any, kind: str, layers: list[str], graphs: int
) -> None:
    """Also of rows that are shorter than a window first, and longer later."""
    model = build(
        make, kind, num_hidden_layers=len(layers), layer_types=layers, sliding_window=150,
        local_attention=300, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    reference, plan = copy.deepcopy(model), find_plan(model)
    apply_compile(model, plan, backend="eager")
    assert apply_unpadding(model, plan, is_compiled=True) is None
    compiled = get_fact(model, CompiledBlocks)
    compiled.expect_other_sizes()
    for lengths in ([90, 4, 6], [400, 3, 290, 17], [151, 150, 149]):
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        ids = torch.arange(mask.numel()).remainder(50).view(mask.shape) + 5
        labels = ids.masked_fill(~mask, -100)
        batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
        expected = run(reference, batch)
        for name, value in run(model, batch).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)
        assert (compiled.graphs, compiled.recompilations) == (graphs, 0)


@pytest.mark.slow
def test_compiled_blocks_of_an_encoder_decoder_model_settle() -> None:
    """T5's, with a bias: rounding may give the two sides different numbers of rows."""
    model = build(AutoModelForSeq2SeqLM, "t5", **PAIR, num_hidden_layers=1, num_decoder_layers=1)
    reference, plan = copy.deepcopy(model), find_plan(model)
    apply_compile(model, plan, backend="eager")
    assert apply_unpadding(model, plan, is_compiled=True) is None
    compiled, counts = get_fact(model, CompiledBlocks), []
    for source, target in (([9, 4, 6], [3, 8, 2]), ([31, 30, 2, 5], [2, 3, 9, 4])) * 2:
        batch = {}
        for name, lengths in (("input_ids", source), ("labels", target)):
            mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
            ids = torch.arange(mask.numel()).remainder(50).view(mask.shape) + 5
            batch[name] = ids.masked_fill(~mask, -100 if name == "labels" else 0)
        batch["attention_mask"] = (batch["input_ids"] != 0).long()
        expected = run(reference, batch)
        for name, value in run(model, batch).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=name)
        counts.append(compiled.graphs)
    assert counts[:1] == [2], "one for each side"
    assert counts[1:] == [4] * 3 and compiled.recompilations == 0


@pytest.mark.parametrize("lengths", [[3, 4, 2, 2], [11, 3, 6, 1]])
def test_as_many_real_tokens_as_a_padded_row_has(lengths: list[int]) -> None:
    """11 of 44 is the case: packed states then have the shape of an argument for every row."""
    model = build(AutoModelForCausalLM, "llama")
    ids = torch.arange(5, 49).view(4, 11)
    mask = torch.arange(11) < torch.tensor(lengths)[:, None]
    labels = ids.masked_fill(~mask, -100)
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
    expected = run(model, batch)
    assert apply_unpadding(model, find_plan(model)) is None
    for name, value in run(model, batch).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_batch_whose_loss_would_change_stays_padded() -> None:
    model = build(AutoModelForCausalLM, "llama")
    assert shifts_labels(model)
    batch = make_batch(model)
    assert find_rows(model, batch) is not None
    assert find_rows(model, {**batch, "labels": batch["input_ids"]}) is None, "padding is trained"
    left = {name: value.flip(1) for name, value in batch.items()}
    assert find_rows(model, left) is None, "the first token is predicted from padding"
    without = {name: value for name, value in batch.items() if name != "labels"}
    assert find_rows(model, without) is None, "what the loss will read is not known"
    assert find_rows(model, {**batch, "output_hidden_states": True}) is None
    assert find_rows(model, batch, rounds_up=True) is not None
    gap = batch["attention_mask"].clone()
    gap[:, 1] = 0
    with_gap = {**batch, "attention_mask": gap, "labels": torch.full_like(gap, -100)}
    assert find_rows(model, with_gap) is not None
    assert find_rows(model, with_gap, rounds_up=True) is None, "a sliding window would have gaps"
    full = {name: value[:1] for name, value in batch.items()}
    assert find_rows(model, full) is None, "there is nothing to remove"
    assert find_rows(model, full, rounds_up=True) is None
    little = {name: value[:1].repeat(4, 6) for name, value in batch.items()}
    little["attention_mask"][0, -1] = 0
    little["labels"][0, -1] = -100
    assert find_rows(model, little) is None, "removing it costs more than it saves"
    assert find_rows(model, little, rounds_up=True) is not None, "one of a few sizes is replayed"


def test_a_classifier_that_reads_padding_stays_padded() -> None:
    model = build(AutoModelForSequenceClassification, "bert")
    batch = make_batch(model, "rows")
    left = {name: value.flip(-1) for name, value in batch.items()}
    assert find_rows(model, batch) is not None
    assert find_rows(model, left) is None, "its first token is padding"


def test_a_hook_of_the_user_sees_padded_states() -> None:
    model = build(AutoModelForCausalLM, "llama")
    assert apply_unpadding(model, find_plan(model)) is None
    seen = []
    model.model.layers[1].register_forward_hook(lambda *a: seen.append(a[2]))
    model(**make_batch(model))
    shape = (seen[0][0] if isinstance(seen[0], tuple) else seen[0]).shape
    assert shape[:2] == (4, 11)


def test_generating_is_unchanged() -> None:
    model = build(AutoModelForCausalLM, "llama")
    ids = torch.tensor([[0, 0, 7, 8], [5, 6, 7, 8]])
    given = {"input_ids": ids, "attention_mask": (ids != 0).long(), "max_new_tokens": 4}
    expected = model.generate(**given, do_sample=False)
    assert apply_unpadding(model, find_plan(model)) is None
    assert torch.equal(model.generate(**given, do_sample=False), expected)


def test_dropout_of_attention_is_kept() -> None:
    model = build(AutoModelForMaskedLM, "bert", attention_probs_dropout_prob=0.5)
    assert apply_unpadding(model, find_plan(model)) is None
    model.train()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and "attention.self" not in name:
            module.p = 0.0
    batch = make_batch(model)
    torch.manual_seed(1)
    losses = {model(**batch).loss.item() for _ in range(3)}
    assert len(losses) == 3


def test_it_is_used_by_default_from_the_first_batch() -> None:
    model = build(AutoModelForMaskedLM, "bert").train()
    RapidformerEngine(args={"lr": 0.1, "log_level": "error"}).compose(model)
    shapes: list[Any] = []
    find_plan(model).get_blocks(model)[0].register_forward_hook(Note(shapes))
    model(**make_batch(model)).loss.backward()
    with torch.no_grad():
        logits = model(**make_batch(model)).logits
    assert shapes == [(1, 21), (4, 11)] and logits.isfinite().all(), "predictions have padding"


class Padded(Finetuner):
    """Causal, with dropout and rows of different lengths."""

    def train_valid_test_datasets_provider(self) -> Any:
        rows = [[1 + (7 * i + j) % 30 for j in range(3 + i % 5)] for i in range(24)]
        return [{"input_ids": row, "labels": row} for row in rows], None, None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        return build(AutoModelForCausalLM, "gpt2", attn_pdrop=0.3).train(), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss


def test_a_resumed_run_removes_padding_from_the_same_batches(tmp_path: Path) -> None:
    """Dropout draws as many numbers as there are tokens, so it shows which batches are padded."""

    def train(name: str, **more: Any) -> dict[str, torch.Tensor]:
        settings = {
            "micro_batch_size": 4, "train_iters": 4, "save_interval": 2, "lr": 1e-2,
            "log_level": "error", "save": str(tmp_path / name), **more,
        }  # fmt: skip
        trainer = Padded(RapidformerEngine(args=settings))
        trainer.train()
        return dict(trainer.engine.model.parallelized.model.named_parameters())

    expected = train("whole")
    train("stopped", exit_interval=2)
    for name, weight in train("stopped", load=str(tmp_path / "stopped")).items():
        assert torch.equal(weight, expected[name]), name
