"""How a model is cut: stages by cost, what each process keeps, which schedule is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from transformers import (
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMultipleChoice,
    BloomConfig,
    BloomForCausalLM,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from rapidformer.accel.pipeline.cut import apply_cut, find_holdings
from rapidformer.accel.pipeline.discovery import find_usage
from rapidformer.accel.pipeline.gates import StageContext, describe_gradient_problem
from rapidformer.accel.pipeline.layout import Layout, balance, build_layout
from rapidformer.accel.pipeline.refusals import explain_absence, find_model_problem
from rapidformer.accel.pipeline.schedule import choose_kind
from rapidformer.errors import ConfigurationError, ModelError, RapidformerError
from rapidformer.models.plan import find_plan
from rapidformer.models.tensor_plans import describe_other_splits, find_tensor_plan
from tests.parity.models import build_model


def _lay_out(blocks: int, processes: int, schedule: str | None = None, **more: Any) -> Layout:
    given = {"before": 0.0, "after": 0.0, "layers_per_stage": None, "model": "Model", **more}
    return build_layout([1.0] * blocks, num_processes=processes, schedule=schedule, **given)


def test_stages_are_balanced_by_cost_not_by_count() -> None:
    assert balance([1.0] * 8, 4) == [0, 2, 4, 6, 8]
    # A head that weighs as much as three blocks takes their place.
    assert balance([1.0] * 13, 4, after=3.0) == [0, 4, 8, 12, 13]
    assert balance([1.0] * 5, 2, before=1.0, after=4.0) == [0, 4, 5]
    assert balance([5.0, 1.0, 1.0, 1.0], 2) == [0, 1, 4]
    assert balance([1.0, 1.0], 2, after=100.0) == [0, 1, 2]


def test_who_has_which_stage() -> None:
    looped = _lay_out(8, 2, "interleaved")
    assert [stage.owner for stage in looped.stages] == [0, 1, 0, 1]
    folded = _lay_out(8, 2, "zero-bubble")
    assert [stage.owner for stage in folded.stages] == [0, 1, 1, 0]
    assert folded.describe() == "zero-bubble, blocks 0-1 and 6-7 | 2-3 and 4-5"
    virtual = _lay_out(12, 2, layers_per_stage=2)
    assert virtual.schedule == "interleaved"
    assert [stage.end - stage.start for stage in virtual.stages] == [2] * 6


@pytest.mark.parametrize(
    ("blocks", "processes", "schedule", "layers", "reason"),
    [
        (3, 4, None, None, "Model has 3 blocks, and every rank needs one: use 3 or fewer"),
        (1, 2, None, None, "has 1 block, and every rank needs one: remove the flag"),
        (6, 4, "zero-bubble", None, "needs two stages on each of the 4 ranks.* use 1f1b"),
        (12, 2, None, 4, "the 12 blocks of Model into .* per rank: use 1 or 2 or 3"),
        (12, 2, None, 6, "into two or more equal stages per rank"),
    ],
)
def test_what_cannot_be_laid_out_says_what_can(
    blocks: int, processes: int, schedule: str | None, layers: int | None, reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        _lay_out(blocks, processes, schedule, layers_per_stage=layers)


def test_too_few_micro_batches_take_another_schedule() -> None:
    plain, looped, folded = (_lay_out(8, 4, s) for s in ("1f1b", "interleaved", "zero-bubble"))
    assert choose_kind(plain, 4) is Schedule1F1B
    assert choose_kind(plain, 3) is ScheduleGPipe
    assert choose_kind(looped, 8) is ScheduleInterleaved1F1B
    assert choose_kind(looped, 3) is ScheduleInterleaved1F1B
    assert choose_kind(looped, 9) is ScheduleLoopedBFS
    assert choose_kind(folded, 1) is ScheduleZBVZeroBubble
    assert choose_kind(_lay_out(8, 4, "gpipe"), 8) is ScheduleGPipe


# ---- where parameters are used -------------------------------------------------------------------


def _find(model: nn.Module) -> dict[str, set[int]]:
    return find_usage(model, find_plan(model)).blocks_of


def test_parameters_outside_of_blocks_are_found_where_they_are_used() -> None:
    usage = _find(build_model("gpt2", layers=4))
    assert usage == {
        "transformer.wte.weight": {0},
        "transformer.wpe.weight": {0},
        "transformer.ln_f.weight": {3},
        "transformer.ln_f.bias": {3},
        "lm_head.weight": {3},
    }
    bert = _find(build_model("bert", layers=4))
    assert bert["bert.embeddings.LayerNorm.weight"] == {0}
    assert bert["bert.pooler.dense.weight"] == {3}


def test_what_every_block_is_given_is_used_by_all_of_them() -> None:
    usage = _find(build_model("shared-bias", layers=4))
    assert usage["bias.weight"] == {0, 1, 2, 3}
    assert usage["embedding.weight"] == {0, 1, 2, 3}  # the bias is made from it, and the skip
    assert usage["head.weight"] == {3}


def test_blocks_that_return_tuples_are_met_with_tuples() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=3, n_head=2))
    gpt2 = build_model("gpt2", layers=3)
    assert not find_usage(gpt2, find_plan(gpt2)).tuple_size
    usage = find_usage(model, find_plan(model))
    assert usage.blocks_of["transformer.word_embeddings_layernorm.weight"] == {0}


SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip
TWO_STACKS: dict[str, Any] = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
TOWERS = {
    "text_config": {**SIZES, "vocab_size": 64, "max_position_embeddings": 16},
    "vision_config": {**SIZES, "image_size": 8, "patch_size": 4},
}
REFUSED = {
    "its blocks are not one stack but 2: text_model.encoder.layers, vision_model.encoder.layers": (
        lambda: CLIPModel(CLIPConfig(**TOWERS, projection_dim=8))
    ),
    "BartForConditionalGeneration has an encoder and a decoder": (
        lambda: BartForConditionalGeneration(BartConfig(**TWO_STACKS))
    ),
    "WhisperForConditionalGeneration has an encoder and a decoder": (
        lambda: WhisperForConditionalGeneration(WhisperConfig(**TWO_STACKS, num_mel_bins=8))
    ),
    "all layers of AlbertModel are the same module": (
        lambda: AlbertModel(AlbertConfig(**SIZES, vocab_size=64, embedding_size=8))
    ),
    "T5ForConditionalGeneration has an encoder and a decoder": lambda: build_model("small-t5"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refusal_recommends_only_what_the_model_supports(reason: str) -> None:
    """It recommended tensor parallelism, which refused the model too, CLIP in Python's words."""
    model = REFUSED[reason]()
    plan = find_plan(model)
    message = find_model_problem(model, plan)
    if not message:
        with pytest.raises(ModelError) as caught:
            find_usage(model, plan)
        message = str(caught.value)
    assert reason in message and message.endswith("--zero-3-memory-optimization instead.")
    is_recommended = "--tensor-model-parallel-size" in message
    assert is_recommended == isinstance(model, T5ForConditionalGeneration)
    if not is_recommended:
        with pytest.raises(ModelError, match="no plan says how"):
            find_tensor_plan(model, plan)


def test_a_loss_that_stages_cannot_have_is_sent_only_where_it_works() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=2))
    always = "data parallelism"
    for model, instead in (
        (bloom, always), (build_model("gpt2"), f"--tensor-model-parallel-size or {always}"),
    ):  # fmt: skip
        others = describe_other_splits(model, find_plan(model), always)
        context = StageContext(dtype=torch.float32, tuple_size=0, instead=others)
        assert describe_gradient_problem(context).endswith(f"only: use {instead}.")
        assert explain_absence(context, False, "w").endswith(f"otherwise use {instead}.")


class Mapped(nn.Module):
    def __init__(self, *, calls_twice: bool = False) -> None:
        super().__init__()
        self.calls_twice = calls_twice
        self.embedding = nn.Embedding(32, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, input_ids: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(layer(hidden) if self.calls_twice else hidden)
        return hidden


def test_blocks_that_run_twice_are_refused() -> None:
    with pytest.raises(ModelError, match="do not run one after the other, each once"):
        _find(Mapped(calls_twice=True))


def test_a_model_of_unknown_inputs_says_how_to_give_a_plan() -> None:
    class Strange(Mapped):
        def forward(self, pairs: Any) -> torch.Tensor:  # type: ignore[override]
            return super().forward(pairs[0])

    with pytest.raises(ModelError, match=r"'before': \['embedding'\], 'after'"):
        _find(Strange())


def test_a_model_of_multiple_choices_is_tried_with_as_many_rows() -> None:
    model = BertForMultipleChoice(
        BertConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, vocab_size=32)
    )
    assert find_usage(model, find_plan(model)).blocks_of["classifier.weight"] == {2}


def test_a_model_that_refuses_the_trial_run_gives_its_own_reason() -> None:
    model = GPT2ForSequenceClassification(
        GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)
    )
    with pytest.raises(ModelError, match=r"if no padding token is defined\)\. Give it"):
        find_usage(model, find_plan(model))


# ---- what stays ----------------------------------------------------------------------------------


def test_tied_names_and_a_layers_parameters_stay_together() -> None:
    model = build_model("bert-mlm", layers=4)
    plan = find_plan(model)
    layout = _lay_out(4, 4)
    holdings = find_holdings(model, plan, layout, find_usage(model, plan))
    assert holdings.processes_of["bert.embeddings.word_embeddings.weight"] == {0, 3}
    assert holdings.processes_of["cls.predictions.decoder.weight"] == {0, 3}
    assert holdings.processes_of["bert.encoder.layer.2.output.dense.weight"] == {2}
    assert holdings.processes_of["bert.embeddings.position_embeddings.weight"] == {0}
    together = set().union(*(holdings.get_held(process) for process in range(4)))
    assert together == {name for name, _ in model.named_parameters(remove_duplicate=False)}


def test_what_leaves_keeps_its_place_and_is_not_a_number() -> None:
    model: Any = build_model("gpt2", layers=4)
    kept = {"transformer.h.1.ln_1.weight", "transformer.h.1.ln_1.bias"}
    expected = model.transformer.h[1].ln_1.weight.detach().clone()
    shape = model.transformer.wte.weight.shape
    model_runs = False
    apply_cut(model, kept, torch.device("cpu"), lambda name: "" if model_runs else f"no {name}")
    assert {name for name, _ in model.named_parameters()} == kept
    assert torch.equal(model.transformer.h[1].ln_1.weight, expected)
    assert model.transformer.wte.weight.shape == shape
    with pytest.raises(RapidformerError, match=r"no transformer\.wte\.weight"):
        model.transformer.wte.weight.sum()
    model_runs = True
    assert model.transformer.wte.weight.isnan().all()
    assert model.transformer.wte.weight.untyped_storage().nbytes() == 4
