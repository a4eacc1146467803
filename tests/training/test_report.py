"""What a run says: log lines or a bar, metrics.jsonl, TensorBoard; and silence elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer.config import Settings, parse_arguments
from rapidformer.log import configure_logging
from rapidformer.training import summary
from rapidformer.training.report import Reporter, format_training_line
from rapidformer.training.summary import describe_missed_speed, describe_results
from rapidformer.training.trackers import TrackedRun

LINE: dict[str, Any] = {
    "step": 20,
    "epoch": 1.25,
    "loss": 0.123456,
    "lr": 2e-5,
    "grad_norm": 1.5,
    "step_time": 0.25,
    "tokens_per_second": 12_345.0,
    "samples_per_second": 64.0,
    "padding_share": 0.25,
    "seconds_left": 3725.4,
}


def make(tmp_path: Path | None, *words: str, speaks: bool = True, **options: Any) -> Reporter:
    configure_logging("info")
    folder = ["--save", str(tmp_path)] if tmp_path else []
    return Reporter(parse_arguments([*folder, *words]), total_steps=100, speaks=speaks, **options)


@pytest.mark.parametrize(
    ("device", "words", "steps", "advice"),
    [
        ("cuda", [], 10, "--mixed-precision"),
        ("cuda", ["--mixed-precision"], 5000, "--compile"),
        ("cuda", ["--mixed-precision"], 100, None),
        ("cuda", ["--mixed-precision", "--compile"], 5000, None),
        ("cpu", [], 5000, None),
        ("cpu", ["--dynamic-shape", "off"], 5000, "--dynamic-shape auto (up to"),
        ("cuda", ["--mixed-precision", "--cuda-graph", "off"], 100, "--cuda-graph auto (up to"),
        ("cuda", ["--mixed-precision", "--cuda-graph", "off", "--activation-offload"], 100, None),
        ("cuda", ["--deepspeed", "x.json"], 100, None),
    ],
)
def test_speed_that_a_run_misses(
    device: str, words: list[str], steps: int, advice: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "has_bf16", lambda: False)
    args, precision = parse_arguments(words), "bf16" if "--mixed-precision" in words else "fp32"
    text = describe_missed_speed(args, torch.device(device), precision, steps)
    assert text is None if advice is None else f"with {advice}" in str(text)


def test_the_largest_speed_that_a_run_misses_comes_first() -> None:
    words = ["--mixed-precision", "--cuda-graph", "off", "--dynamic-shape", "off"]
    text = describe_missed_speed(parse_arguments(words), torch.device("cuda"), "bf16", 5000)
    flags = ("with --cuda-graph auto (", "; --compile (", "; --dynamic-shape auto (")
    places = [str(text).index(flag) for flag in flags]
    assert places == sorted(places)


def test_a_processor_with_bf16_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "has_bf16", lambda: True)
    device = torch.device("cpu")
    text = describe_missed_speed(parse_arguments([]), device, "fp32", 100)
    assert str(text).startswith("with --mixed-precision (this processor has bf16")
    mixed = parse_arguments(["--mixed-precision"])
    assert describe_missed_speed(mixed, device, "bf16", 100) is None


def test_log_line() -> None:
    assert format_training_line(LINE, 100) == (
        "step 20/100 | epoch 1.25 | loss 0.1235 | lr 2.00e-05 | grad norm 1.500 | 250 ms/step | "
        "12.3k tokens/s | 64.0 samples/s | 25 % padding | 1:02:05 left"
    )


def test_log_line_of_images_does_not_speak_of_tokens() -> None:
    names = LINE.keys() - {"tokens_per_second", "padding_share"}
    text = format_training_line({name: LINE[name] for name in names}, 100)
    assert "250 ms/step | 64.0 samples/s | 1:02:05 left" in text


def test_log_line_with_memory_and_skipped_updates() -> None:
    line = {**LINE, "memory_gib": 3.14159, "skipped_updates": 2, "tokens_per_second": 2.5e6}
    text = format_training_line(line, 100)
    assert " | 3.1 GiB | 2 skipped | " in text
    assert "2.5M tokens/s" in text


def test_lines_go_to_the_log_and_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = make(tmp_path, "--no-progress")
    reporter.log(LINE)
    reporter.log({"step": 20, "epoch": 1.25, "eval_accuracy": 0.75, "eval_loss": 0.5})
    reporter.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "step 20/100 | epoch 1.25 | loss 0.1235" in captured.err
    assert "evaluation at step 20 | accuracy 0.7500 | loss 0.5000" in captured.err
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == LINE
    assert json.loads(lines[1])["eval_accuracy"] == 0.75


def test_other_processes_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = make(tmp_path / "run", speaks=False)
    reporter.say("hello")
    reporter.advance(1, 0.5, 1e-3)
    reporter.log(LINE)
    reporter.log({"step": 1, "eval_loss": 1.0})
    reporter.close()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert not (tmp_path / "run").exists()


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reporter = make(None, "--no-progress")
    reporter.log(LINE)
    reporter.close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reporter = make(tmp_path, "--no-progress")
    reporter.log(LINE)
    reporter.log({"step": 20, "epoch": 1.25, "eval_accuracy": 0.75})
    reporter.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (loss,) = events.Scalars("train/loss")
    assert (loss.step, loss.value) == (20, pytest.approx(0.123456))
    (accuracy,) = events.Scalars("eval/accuracy")
    assert (accuracy.step, accuracy.value) == (20, 0.75)


def test_tensorboard_folder_may_be_chosen(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    reporter = make(None, "--no-progress", "--tensorboard-dir", str(tmp_path / "board"))
    reporter.log(LINE)
    reporter.close()
    assert list((tmp_path / "board").iterdir())


def test_resumed_run_continues_its_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 10}\n{"step": 15}\n')
    make(tmp_path, "--no-progress", resume_step=10).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 10}\n'


def test_progress_bar_instead_of_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = make(tmp_path, "--progress")
    for step in range(1, 101):
        reporter.advance(step, 0.12345, 2e-5)
    reporter.log(LINE)
    reporter.close_bar()
    reporter.say("saved     nothing")
    reporter.close()
    text = capsys.readouterr().err
    assert text.rstrip().endswith("saved     nothing"), "the bar ends above the closing lines"
    assert "100/100" in text
    assert "loss 0.1235" in text
    assert "ms/step" not in text, "no line beside the bar"
    assert (tmp_path / "metrics.jsonl").exists()


class OwnTracker:
    """A user's, which fails at a step."""

    def __init__(self, full_at: int | None = None) -> None:
        self.calls: list[Any] = []
        self._full_at = full_at

    def start(self, run: TrackedRun) -> None:
        self.calls.append((run.name, run.folder, run.settings["micro_batch_size"]))

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        if step == self._full_at:
            raise OSError(28, "No space left on device")
        self.calls.append((step, values["loss"]))

    def finish(self) -> None:
        self.calls.append("finished")


def test_a_users_tracker_gets_the_run_and_its_numbers(tmp_path: Path) -> None:
    tracker = OwnTracker()
    reporter = make(tmp_path, "--no-progress", "--micro-batch-size", "3", trackers=[tracker])
    reporter.log(LINE)
    reporter.close()
    assert tracker.calls == [(tmp_path.name, tmp_path, 3), (LINE["step"], LINE["loss"]), "finished"]


def test_a_tracker_that_cannot_write_does_not_end_the_run(tmp_path: Path, caplog: Any) -> None:
    tracker = OwnTracker(full_at=LINE["step"])
    reporter = make(tmp_path, "--no-progress", trackers=[tracker])
    reporter.log(LINE)
    reporter.log(LINE)
    reporter.close()
    assert caplog.text.count("OwnTracker cannot be written any more") == 1
    assert "No space left" in caplog.text
    assert len(tracker.calls) == 1


def test_an_adapter_says_how_it_is_merged(tmp_path: Path) -> None:
    """A CrossEncoder cannot load the head that comes with an adapter."""
    folder = tmp_path / "best"
    folder.mkdir()
    args = Settings(task="reranking", save=str(tmp_path))
    best = ("loss", 0.1, 3)
    for wanted in (f"export {tmp_path} FOLDER", "merges the adapter, for CrossEncoder(FOLDER)"):
        lines = list(describe_results(args, step=3, total=3, best=best))
        (line,) = [line for line in lines if "rapidformer export" in line]
        assert line.endswith(wanted)
        (folder / "adapter_config.json").write_text("{}")
