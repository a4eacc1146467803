"""A model cut into stages == one process: losses, every gradient, updated weights, ties.

The whole matrix runs by ``python tests/parity/matrix.py``; each test here says what its row guards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import GPT2LMHeadModel

from rapidformer import Finetuner
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ModelError, RapidformerError
from rapidformer.models.gpt import GPTConfig, GPTForCausalLM
from rapidformer.verification.recorder import collect_weights
from rapidformer.verification.trace import Trace
from tests.parity.harness import (
    PADDED,
    PIPELINE,
    SHORT,
    TENSOR,
    UNPADDED,
    Case,
    Settings,
    Training,
    check,
    compose,
    keep_rate,
    make_forward,
    make_sgd,
    run_one,
    train,
)
from tests.parity.hooks import only_looking
from tests.parity.limits import STAGE_LIMITS, get_bytes, get_losses
from tests.parity.models import SAMPLES, build_model, build_rows, collate, sharpen
from tests.parity.resuming import check_route
from tests.processes import run_in_kept_processes


def staged(model: str, layers: int, settings: Settings, **more: Any) -> Case:
    return Training(model, layers=layers, **more), settings


def check_stages(world_size: int, cases: list[Case]) -> list[list[Trace]]:
    return check(world_size, cases, STAGE_LIMITS, are_copies_equal=True)


def check_fraction(traces: list[Trace], case: Case, fraction: float) -> None:
    whole = get_bytes(run_one(case[0]))
    assert max(get_bytes(trace) for trace in traces) < fraction * whole


def _stage(schedule: str, size: int = 2, **more: Any) -> dict[str, Any]:
    return {PIPELINE: size, "pipeline_schedule": schedule, **more}


def test_two_processes_that_share_the_stack_equal_one() -> None:
    """Ten updates and more; rows of any length, tied embeddings on both ends.

    Row 29, a micro-batch of its own, has no label; an update of each epoch is a smaller one.
    """
    cases = [
        staged("llama", 4, _stage("1f1b"), epochs=2, rows=SAMPLES),
        staged("gpt2", 4, _stage("zero-bubble", micro_batch_size=1), rows=29),
    ]
    traces = check_stages(2, cases)
    assert len(traces[0][0].losses) >= 10
    check_fraction(traces[0], cases[0], 0.55)


def test_every_family_under_some_schedule() -> None:
    """Among them a bias that all blocks share, and a first stage that learns nothing.

    test_unpad_in_stages.py has other families.
    """
    cases = [
        staged("qwen3", 4, _stage("interleaved")),
        staged("bert-mlm", 3, _stage("1f1b"), rows=SHORT),
        staged("gpt", 4, _stage("zero-bubble"), rows=SHORT),
        staged("custom", 2, _stage("gpipe"), rows=SHORT),
        staged("gpt2-frozen", 4, _stage("zero-bubble"), rows=SHORT),
        staged("bloom", 2, _stage("1f1b"), rows=SHORT),
        staged(
            "shared-bias", 8, {PIPELINE: 2, "num_layers_per_virtual_pipeline_stage": 2}, rows=SHORT
        ),
    ]
    check_stages(2, [(training, {**settings, **UNPADDED}) for training, settings in cases])


def test_four_processes_that_share_the_stack() -> None:
    """Ends that hold a tied weight are no neighbours, and pass its gradient past the others."""
    cases = [
        staged("qwen3", 4, _stage("1f1b", 4)),
        staged("bert-mlm", 8, _stage("zero-bubble", 4)),
    ]
    check_stages(4, cases)


def test_stages_under_other_ways_of_sharing() -> None:
    """Zero-bubble assigns gradients, which no hook sees: they must be summed all the same.

    test_unpad_in_stages.py has other schedules, with recompute, split tokens, ZeRO-2 and ZeRO-3.
    """
    cases = [
        staged("qwen3", 4, _stage("zero-bubble", **{TENSOR: 2})),
        staged("qwen3", 4, _stage("zero-bubble")),
        staged("gpt2", 4, _stage("interleaved", zero_1_memory_optimization=True)),
    ]
    check_stages(4, cases)


# ---- precision -----------------------------------------------------------------------------------


def _train_in(
    kinds: list[tuple[str, float]], settings: dict[str, Any]
) -> list[tuple[list[float], list[float], int]]:
    found = []
    for precision, scale in kinds:
        given = {"mixed_precision": precision, "initial_loss_scale": scale}
        training = Training("bert-mlm", layers=2, rows=8, global_batch_size=4)
        engine, model, loader = compose(training, {**settings, **given})
        trace = train(engine, model, loader)
        found.append((get_losses(trace), trace.norms, engine.updates.clock.skipped))
    engine.close()
    return found


def test_sixteen_bits_pass_between_stages() -> None:
    """The first update is as in one process; an overflow of fp16 is agreed on by all stages."""
    kinds = [("bf16", 1.0), ("fp16", 1024.0), ("fp16", 2.0**40)]
    expected = _train_in(kinds, {})
    first, second = run_in_kept_processes(_train_in, 2, kinds, {PIPELINE: 2})
    np.testing.assert_equal(first, second)
    for mine, one in zip(first, expected, strict=True):
        assert mine[0][0] == pytest.approx(one[0][0], rel=1e-5)
        assert mine[2] == one[2]
        if not one[2]:
            assert np.allclose(mine[1], one[1], rtol=2e-2)
    assert [result[2] for result in first] == [0, 0, 2]


# ---- checkpoints and exports ---------------------------------------------------------------------


def test_a_run_continues_from_layout_to_layout(tmp_path: Path) -> None:
    """Exports are whole. GPT-2's fused weight is held in pieces, which torch cannot save itself.

    This is one route. ``python benchmarks/fault_campaign.py layouts`` runs all pairs and triples of
    eight layouts, two updates in each, and compares the optimizer's state too.
    """
    route = [
        (1, {}),
        (4, _stage("1f1b", **{TENSOR: 2})),
        (4, {TENSOR: 2, "fsdp_memory_optimization": True}),
        (4, _stage("zero-bubble", fsdp_memory_optimization=True)),
        (1, {}),
    ]
    check_route(Training("gpt2", layers=4, rows=8), route, GPT2LMHeadModel, tmp_path)


# ---- templates -----------------------------------------------------------------------------------


class StagedFinetuner(Finetuner):
    dropout = 0.0

    def train_valid_test_datasets_provider(self) -> Any:
        rows = build_rows("bert")
        return rows[:12], rows[20:27], None, collate

    def model_optimizer_lr_scheduler_provider(
        self, pre_process: bool, post_process: bool
    ) -> tuple[Any, None, None]:
        assert pre_process and post_process  # Megatron's form: the whole model is asked for
        return build_model("bert", self.dropout, 4), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        loss = model(**batch).loss
        return loss, len(batch["labels"]), {"twice": 2 * loss}

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> dict[str, float]:
        outputs = [(model[0](**batch), batch["labels"]) for batch in eval_dataloader]
        rows = torch.cat([self.gather(output.logits[:, 0]) for output, _ in outputs])
        return {"rows": len(rows), "sum": float(rows.sum())}


def _finetune(
    folder: str, settings: dict[str, Any], dropout: float
) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    more = {"optimizer": "adam", "adam_eps": 1e-6, "lr": 1e-2, "log_interval": 1, "save": folder}
    more |= {"keep_last": True, "epochs": 2, "lr_decay_style": "constant"}
    engine = RapidformerEngine(args={**PADDED, **more, **settings})
    finetuner = StagedFinetuner(engine)
    finetuner.dropout = dropout
    finetuner.train()
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    shown = {"loss", "twice", "grad_norm", "eval_rows", "eval_sum", "lr"}
    weights = collect_weights(engine.model.parallelized.model)
    engine.close()
    rows = ({k: v for k, v in json.loads(line).items() if k in shown} for line in lines)
    return [row for row in rows if row], weights  # how long a save took is another line


def test_a_template_trains_and_evaluates_as_one_process_does(tmp_path: Path) -> None:
    expected, _ = _finetune(str(tmp_path / "one"), {}, 0.0)
    settings = _stage("zero-bubble")
    (lines, _), _ = run_in_kept_processes(_finetune, 2, str(tmp_path / "two"), settings, 0.0)
    assert [line.keys() for line in lines] == [line.keys() for line in expected]
    assert sum("eval_sum" in line for line in lines) == 2
    for mine, other in zip(lines, expected, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


def test_a_resumed_run_of_stages_is_bit_equal(tmp_path: Path) -> None:
    """Dropout included: what a stage draws depends on the update and the micro-batch alone."""
    straight = run_in_kept_processes(_finetune, 2, str(tmp_path / "whole"), {PIPELINE: 2}, 0.2)
    halved = str(tmp_path / "halved")
    run_in_kept_processes(
        _finetune, 2, halved, {PIPELINE: 2, "exit_interval": 2, "save_interval": 2}, 0.2
    )
    resumed = run_in_kept_processes(_finetune, 2, halved, {PIPELINE: 2, "load": halved}, 0.2)
    for (_, mine), (_, others) in zip(resumed, straight, strict=True):
        assert mine.keys() == others.keys()
        for key, value in mine.items():
            assert np.array_equal(value, others[key]), key


# ---- outside of a schedule -----------------------------------------------------------------------


def _watch_inputs(model: Any) -> set[int]:
    """How many tokens of each row the model was given, over all calls."""
    lengths: set[int] = set()

    def look(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        lengths.add(args[0].shape[-1])

    model.get_input_embeddings().register_forward_pre_hook(look)
    return lengths


def _call(names: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name in names:
        engine = RapidformerEngine(args={**PADDED, **settings})
        model: Any = build_model(name, layers=4)
        sharpen(model)
        engine.compose(model)
        model.eval()
        ids = torch.tensor([[5, 6, 7], [9, 10, 11]])
        labels = torch.tensor([0, 1]) if name == "bert" else ids
        with torch.no_grad():
            output = model(input_ids=ids, labels=labels)
        answers[name] = [type(output).__name__, float(output.loss), output.logits.numpy().copy()]
        if name != "bert":
            mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
            options = {"max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None}
            options["attention_mask"] = mask
            read = _watch_inputs(model)
            answers[name] += [model.generate(ids, **options).tolist()]
            answers[name] += [model.generate(ids, num_beams=2, **options).tolist()]
            torch.manual_seed(3)
            answers[name] += [model.generate(ids, do_sample=True, **options).tolist()]
            assert read == {3, 1}, "a cache holds all tokens but the newest"
    engine.close()
    return answers


def test_a_call_without_gradients_gives_every_process_the_output() -> None:
    models = ["gpt2", "qwen3", "bert"]
    expected = _call(models, {})
    layouts = [
        (2, models, _stage("interleaved", num_layers_per_virtual_pipeline_stage=1)),
        (4, models[:1], _stage("1f1b", zero_3_memory_optimization=True)),
    ]
    for world_size, names, settings in layouts:
        for answers in run_in_kept_processes(_call, world_size, names, settings):
            for name in names:
                kind, loss, logits, *texts = expected[name]
                assert answers[name][0] == kind
                assert answers[name][1] == pytest.approx(loss, rel=1e-5)
                assert np.allclose(answers[name][2], logits, atol=1e-4), name
                assert answers[name][3:] == texts, name


# ---- dropout -------------------------------------------------------------------------------------


def _train_with_dropout() -> tuple[list[float], bool]:
    engine = RapidformerEngine(args={**PADDED, PIPELINE: 2})
    model = build_model("gpt2", 0.3, layers=4)
    rows = build_rows("gpt2")[:8]
    loader = engine.data.build_loader(rows, collate, shuffle=False, is_training=True)
    engine.compose(model, torch.optim.SGD(model.parameters(), lr=0.0), keep_rate)
    torch.rand(engine.runtime.topology.get_rank("pipeline") + 1)  # a script that draws unequally
    losses: list[float] = []
    masks: list[torch.Tensor] = []
    own = engine.model.parallelized.pipeline.local_plan.get_blocks(model)[0]
    look = only_looking(lambda module, given, out: masks.append(out == 0))
    own.mlp.dropout.register_forward_hook(look)
    for _ in range(2):
        for update in engine.data.iterate_updates(loader):
            losses += [float(r.loss) for r in engine.run_update(make_forward(model), update)]
            engine.step()
    drawn = [bool((a.shape != b.shape) or (a != b).any()) for a, b in pairwise(masks)]
    first = torch.rand(1)
    everyone = [torch.zeros(1) for _ in range(2)]
    torch.distributed.all_gather(everyone, first)
    engine.close()
    return losses, all(drawn) and bool(everyone[0] == everyone[1])


def test_stages_draw_new_masks_in_every_update_and_agree_afterwards() -> None:
    (losses, is_fine), (others, is_fine_too) = run_in_kept_processes(_train_with_dropout, 2)
    assert losses == others
    assert losses[:4] != losses[4:]
    assert is_fine and is_fine_too


# ---- what cannot work ----------------------------------------------------------------------------


class Skipping(nn.Module):
    """A model whose last part looks back at an early block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        outputs = []
        for layer in self.layers:
            hidden = layer(hidden)
            outputs.append(hidden)
        return hidden + outputs[0]


def _build_refused(name: str) -> nn.Module:
    if name == "skipping":
        return Skipping()
    if name == "moe":
        return GPTForCausalLM(
            GPTConfig(
                num_layers=4, hidden_size=32, num_attention_heads=4, max_position_embeddings=40,
                vocab_size=68, num_experts=4, moe_layer_freq=2,
            )
        )  # fmt: skip
    if name == "albert":
        from transformers import AlbertConfig, AlbertForMaskedLM

        return AlbertForMaskedLM(
            AlbertConfig(
                vocab_size=64, hidden_size=16, num_hidden_layers=4, num_attention_heads=2,
                intermediate_size=16, embedding_size=8,
            )
        )  # fmt: skip
    return build_model(name, layers=2 if name == "t5" else 4)


def _refuse(cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    messages = []
    for name, settings in cases:
        try:
            given = {**PADDED, "lr": 0.1, "train_iters": 3, PIPELINE: 2, **settings}
            engine = RapidformerEngine(args=given)
            engine.compose(_build_refused(name))
            messages.append("composed")
        except RapidformerError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_cut_is_refused_with_the_reason() -> None:
    expected = [
        ("t5", {}, "has an encoder and a decoder, not one stack"),
        ("albert", {}, "all layers of AlbertForMaskedLM are the same module"),
        ("skipping", {}, "its output depends on several blocks, not only on the last"),
        ("moe", {}, "adds a loss of its own in every mixture of experts"),
        ("gpt2", {"num_layers_per_virtual_pipeline_stage": 3}, "the 4 blocks of GPT2LMHeadModel"),
        (
            "gpt2",
            {"pipeline_schedule": "zero-bubble", "num_layers_per_virtual_pipeline_stage": 1},
            "zero-bubble always has two stages on each rank",
        ),
        (
            "gpt2",
            {"pipeline_schedule": "1f1b", "num_layers_per_virtual_pipeline_stage": 1},
            "use --pipeline-schedule interleaved",
        ),
        (
            "gpt2",
            {"pipeline_schedule": "zero-bubble", "compile": True},
            "--compile cannot be combined with --pipeline-schedule zero-bubble: use 1f1b",
        ),
        ("gpt2", {"pipeline_schedule": "zero-bubble"}, "composed"),
        (
            "shared-bias",
            {"pipeline_schedule": "zero-bubble"},
            "of SharedBias is passed to several blocks",
        ),
    ]
    messages = run_in_kept_processes(_refuse, 2, [case[:2] for case in expected])[0]
    for message, (name, _, reason) in zip(messages, expected, strict=True):
        assert reason in message, (name, message)


def _learn_from_a_teacher(composes: bool) -> list[float]:
    engine, model = RapidformerEngine(args={**PADDED, PIPELINE: 2}), build_model("gpt2")
    teacher: Any = build_model("small-gpt2")
    engine.compose(model, make_sgd(model), keep_rate)
    if composes:
        helper = RapidformerEngine(args={**PADDED, PIPELINE: 2})
        helper.model.compose_for_evaluation(teacher)
    teacher.eval()

    def forward(batch: Any) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(**batch).logits.mean()
        loss: torch.Tensor = (model(**batch).logits.mean() - target).square()
        return loss

    loader = engine.data.build_loader(build_rows("gpt2")[:8], collate, is_training=True)
    update = next(iter(engine.data.iterate_updates(loader)))
    return [float(result.loss) for result in engine.run_update(forward, update)]


def _try_both_teachers() -> tuple[list[float], str]:
    losses = _learn_from_a_teacher(composes=False)
    with pytest.raises(RapidformerError) as caught:
        _learn_from_a_teacher(composes=True)
    return losses, str(caught.value)


def test_a_teacher_in_stages_is_refused_inside_the_forward_step() -> None:
    """Its messages met those of the schedule, and a rank was aborted."""
    for losses, message in run_in_kept_processes(_try_both_teachers, 2):
        assert "the forward step calls a second model that is cut into stages, too" in message
        assert losses, "one that was left whole teaches"


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(build_rows("gpt2")[:8])


def _train_on(is_stream: bool) -> list[float]:
    engine = RapidformerEngine(args={**PADDED, PIPELINE: 2})
    model: Any = build_model("gpt2", layers=4)
    rows = Stream() if is_stream else build_rows("gpt2")[:8]
    loader = engine.data.build_loader(rows, collate, shuffle=False, is_training=True)
    engine.compose(model, make_sgd(model), keep_rate)
    losses = []
    for update in engine.data.iterate_updates(loader):
        losses += [float(r.loss) for r in engine.run_update(make_forward(model), update)]
        engine.step()
    return losses


def _train_on_both() -> tuple[list[float], list[float]]:
    return _train_on(True), _train_on(False)


def test_a_stream_trains_as_a_data_set_does() -> None:
    for of_stream, of_data_set in run_in_kept_processes(_train_on_both, 2):
        assert of_stream == of_data_set
        assert len(of_stream) > 1


def _misuse() -> list[str]:
    engine = RapidformerEngine(args={**PADDED, PIPELINE: 2})
    model: Any = build_model("gpt2", layers=4)
    loader = engine.data.build_loader(
        build_rows("gpt2")[:8], collate, shuffle=False, is_training=True
    )
    engine.compose(model, make_sgd(model), keep_rate)
    model.train()
    batch = collate(build_rows("gpt2")[:2])
    update = next(iter(engine.data.iterate_updates(loader)))

    calls = [
        lambda: model(**batch),
        lambda: engine.backward(torch.zeros(())),
        lambda: model.transformer(batch["input_ids"]),
        lambda: engine.run_update(lambda batch: torch.zeros(()), update),
        lambda: model(**batch, output_hidden_states=True),
    ]
    messages = []
    for call in calls:
        with pytest.raises(RapidformerError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_a_loop_that_cannot_be_pipelined_says_what_to_do() -> None:
    for messages in run_in_kept_processes(_misuse, 2):
        assert "for update in engine.data.iterate_updates(loader):" in messages[0]
        assert "use engine.run_update(), Finetuner or PreTrainer" in messages[1]
        assert "call the whole model" in messages[2]
        assert "returned without calling the model" in messages[3]
        assert "output_hidden_states=True collects something from every block" in messages[4]


def test_a_plan_may_say_what_stands_around_the_blocks() -> None:
    from rapidformer.accel.pipeline.discovery import find_usage
    from rapidformer.models.plan import find_plan

    class Planned(Skipping):
        def rapidformer_plan(self) -> dict[str, Any]:
            return {"blocks": "layers", "before": "embedding", "after": []}

    usage = find_usage(Planned(), find_plan(Planned()))
    assert usage.blocks_of == {"embedding.weight": {0}}
    with pytest.raises(ModelError, match="nothing in Planned has the name norm"):
        Planned.rapidformer_plan = lambda self: {"blocks": "layers", "after": "norm"}  # type: ignore[method-assign]
        find_plan(Planned())
