"""What a benchmark measures, on a run in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from rapidformer import Finetuner, RapidformerEngine
from rapidformer.benchmarking.benched_run import measure_run, measure_trainer, split_steps
from rapidformer.benchmarking.job import (
    Job,
    Result,
    describe_gain,
    describe_ratio,
    describe_result,
    merge,
)
from rapidformer.errors import RapidformerError

ROWS = [{"input_ids": [1 + i % 7] * (3 + i % 4), "labels": i % 2} for i in range(16)]
SETTINGS = {"micro_batch_size": 2, "global_batch_size": 4, "epochs": 1, "lr": 1e-3}


class Bench(Finetuner):
    rows: Any = ROWS

    def train_valid_test_datasets_provider(self) -> Any:
        return self.rows, self.rows, None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1}
        config = BertConfig(**sizes, num_attention_heads=2, intermediate_size=16)
        return BertForSequenceClassification(config), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss


def train(**more: Any) -> None:
    Bench(RapidformerEngine(args={**SETTINGS, **more})).train()


def make_job(folder: Path, **more: Any) -> Job:
    return Job(folder=str(folder), name="run", steps=5, warm_up=2, **more)


def test_a_run_is_timed_and_counted(tmp_path: Path) -> None:
    result = measure_run(make_job(tmp_path), train)
    assert len(result.step_times) == 5
    assert result.rows == 5 * 4
    assert result.tokens < result.slots
    assert set(result.phases) == {"loop", "data", "forward", "backward", "update"}
    assert sum(result.phases.values()) == pytest.approx(result.seconds)
    assert result.operations > 0
    assert not list(tmp_path.iterdir()), "a benchmark keeps nothing"
    text = "\n".join(describe_result(result))
    for word in ("tokens/s", "MFU", "peak memory", "padding", "waiting for data"):
        assert word in text
    result.matrix_rate = 1e12  # a CPU has none
    assert "6 x" in "\n".join(describe_result(result))


def test_graphs_compiled_in_the_timed_steps_are_reported(tmp_path: Path) -> None:
    class LongerInStepTwo(Bench):
        rows = tuple({"input_ids": [1] * (4 + i // 4), "labels": i % 2} for i in range(8))

    def train_in_order() -> None:
        settings = {**SETTINGS, "compile": True, "compile_backend": "eager"}
        LongerInStepTwo(RapidformerEngine(args={**settings, "dataloader_type": "single"})).train()

    torch._dynamo.reset()  # what other tests have compiled must not count
    result = measure_run(Job(folder=str(tmp_path), name="run", steps=1, warm_up=1), train_in_order)
    assert (result.graphs, result.late_graphs) == (2, 1), "one for the first length, one for others"
    (line,) = [line for line in describe_result(result) if line.startswith("graphs")]
    for text in (line, describe_gain(result, result)):
        assert "1 of them in the timed steps" in text


def test_the_trainer_of_hugging_face_gets_the_same_work(tmp_path: Path) -> None:
    ours = measure_run(make_job(tmp_path), train)
    theirs = measure_trainer(make_job(tmp_path, peer="hf"), train)
    assert (theirs.rows, theirs.model) == (ours.rows, ours.model)
    assert theirs.tokens < theirs.slots
    assert "x as fast" in describe_ratio([ours], [theirs])
    assert "x as fast" in describe_gain(ours, theirs)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.001, 500), (0.1, 400), (5.0, 8), (60.0, 8), (0.0, 500)]
)
def test_short_steps_are_timed_more_often(seconds: float, expected: int) -> None:
    job = Job(folder="", name="run", steps=8, warm_up=3, seconds=5.0)
    assert job.count_steps(seconds) == expected
    assert replace(job, seconds=0.0).count_steps(seconds) == 8


def test_a_script_that_ends_after_enough_steps_is_timed(tmp_path: Path) -> None:
    """This one trains for an epoch of four steps, however many it is asked for."""
    job = Job(folder=str(tmp_path), name="run", steps=2, warm_up=1, seconds=1e9)

    def train_one_epoch() -> None:
        engine = RapidformerEngine(args=SETTINGS)
        loader = engine.data.build_loader(ROWS)
        model, *_ = engine.compose(Bench(engine).model_optimizer_lr_scheduler_provider()[0])
        for update in engine.data.iterate_updates(loader):
            engine.run_update(lambda batch: model(**batch).loss, update)
            engine.step()

    assert len(measure_run(job, train_one_epoch).step_times) == 3


def test_the_ratios_of_runs_in_turn_are_shown() -> None:
    def make_result(seconds: float) -> Result:
        return Result(
            model="m", parameters=1, device="CPU", precision="fp32", global_batch=4,
            first_step=1.0, step_times=[seconds], tokens=120, slots=120, peak_memory=8,
        )  # fmt: skip

    steady = describe_ratio([make_result(1), make_result(2)], [make_result(2), make_result(4)])
    assert steady == (
        "40 tokens/s: rapidformer is 2.00 x as fast (2.00 and 2.00 in turn), with 100% of its "
        "memory"
    )
    far_apart = describe_ratio([make_result(1), make_result(2)], [make_result(2), make_result(2)])
    assert "1.33 x as fast (2.00 and 1.00 in turn)" in far_apart
    assert "use an idle machine" in far_apart


@pytest.mark.parametrize(
    ("first_step", "seconds", "said"),
    [(21.0, 1.5, "first step 21.0 s (pays from step 40 on)"), (21.0, 2.0, "(never pays)"),
     (1.5, 1.5, "first step 1.5 s")],
)  # fmt: skip
def test_when_a_longer_first_step_has_paid_is_shown(
    first_step: float, seconds: float, said: str
) -> None:
    def make(first_step: float, seconds: float) -> Result:
        return Result(
            model="m", parameters=1, device="CPU", precision="fp32", global_batch=1,
            first_step=first_step, step_times=[seconds] * 4, rows=4,
        )  # fmt: skip

    assert describe_gain(make(1.0, 2.0), make(first_step, seconds)).endswith(said)


def test_a_run_that_ends_early_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RapidformerError, match="ended before 7 optimizer steps"):
        measure_run(make_job(tmp_path), lambda: None)


def test_batches_without_labels_cannot_be_compared(tmp_path: Path) -> None:
    class Unlabelled(Bench):
        rows = [{"input_ids": [1, 2]}] * 4

    def train_unlabelled() -> None:
        Unlabelled(RapidformerEngine(args=SETTINGS)).train()

    with pytest.raises(RapidformerError, match="needs batches with labels"):
        measure_trainer(make_job(tmp_path, peer="hf"), train_unlabelled)


def test_steps_are_the_sums_of_their_parts() -> None:
    marks = [("data", 1.0), ("forward", 2.0), ("update", 3.0), ("data", 1.0), ("update", 1.0)]
    steps, phases = split_steps(marks)
    assert steps == [6.0, 2.0]
    assert phases == {"data": 2.0, "forward": 2.0, "update": 4.0}


def test_ranks_that_share_rows_count_once(tmp_path: Path) -> None:
    ranks = [
        Result(
            model="m", parameters=1, device="CPU", precision="fp32", global_batch=4,
            first_step=1.0, step_times=[1.0], rows=4, tokens=20, slots=30, operations=5.0,
            peak_memory=memory, is_counted=is_counted, matrix_rate=10.0,
        )
        for memory, is_counted in ((10, True), (30, False), (20, True))
    ]  # fmt: skip
    whole = merge(ranks)
    assert (whole.rows, whole.tokens, whole.slots, whole.peak_memory) == (8, 40, 60, 30)
    (line,) = [line for line in describe_result(whole) if line.startswith("MFU")]
    assert "33.3%" in line and "/ 3 x " in line, "10 operations per second of 3 devices' 30"
    path = make_job(tmp_path).get_path(1)
    whole.save(path)
    assert Result.load(path) == whole
