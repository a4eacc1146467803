"""``--print-config``: what it prints can be read back, and says where each value comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rapidformer.cli.main import main
from rapidformer.config import get_settings, parse_arguments, resolve


def print_config(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*words, "--print-config"]) == 0
    return capsys.readouterr().out


def read_back(text: str, folder: Path, world_size: int = 1) -> dict[str, object]:
    file = folder / "printed.yaml"
    file.write_text(text, encoding="utf-8")
    args = resolve(parse_arguments(["--config", str(file)]), world_size=world_size)
    return {name: getattr(args, name) for name in get_settings() if name != "config"}


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--task", "masked_lm", "--data-path", "glue", "--data-name", "mrpc", "--lr", "2e-5"],
        [
            *("--dataset-name", "glue", "--epochs", "3", "--global-batch-size", "16"),
            *("--mixed-precision", "--onnx-runtime-training", "--checkpoint-activations"),
        ],
        ["--data-path", "0.3", "a b", "0.7", "c#d", "--no-load-optim", "--no-keep-last"],
        ["--source-prefix", "summarize: ", "--input", "a: b, c", "'quoted'", "- dash", "[ünï]"],
        ["--source-prefix", "first line\nsecond line"],
        ["--train-data", *(f"folder/part-{i:05d}.jsonl" for i in range(100))],
        ["--output", "null", "--save", "123", "--data-name", "true", "--seed", "9007199254740993"],
    ],
    ids=["defaults", "task", "switches", "lists", "texts", "newline", "long list", "lookalikes"],
)
def test_printed_config_reads_back_to_the_same_settings(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = resolve(parse_arguments(words))
    expected = {name: getattr(args, name) for name in get_settings() if name != "config"}
    assert read_back(print_config(words, capsys), tmp_path) == expected


def test_printed_config_of_a_run_of_two_processes_serves_two_processes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Accumulation follows from the number of processes: it must be that of the run."""
    words = ["--nproc-per-node", "2", "--micro-batch-size", "2", "--global-batch-size", "4"]
    args = resolve(parse_arguments(words), world_size=2)
    expected = {name: getattr(args, name) for name in get_settings() if name != "config"}
    assert read_back(print_config(words, capsys), tmp_path, world_size=2) == expected


def test_origins_are_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("clip_grad: 0.5\n")
    words = ["--task", "masked_lm", "--config", str(file), "--seed", "7"]
    lines = {
        line.removeprefix("# ").partition(":")[0]: line.rpartition("# ")[2]
        for line in print_config(words, capsys).splitlines()
        if ":" in line
    }
    assert lines["seed"] == "command line"
    assert lines["clip_grad"] == str(file)
    assert lines["weight_decay"] == "default"
    assert lines["lr"].startswith("derived")
    assert set(lines) == set(get_settings())


def test_it_is_valid_yaml_with_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    content = yaml.safe_load(print_config(["--lr", "1"], capsys))
    follows = {
        *("eval_micro_batch_size", "global_batch_size", "micro_batch_size", "local_rank"),
        "gradient_accumulation_steps",
    }
    assert set(content) == set(get_settings()) - follows


def test_it_serves_another_number_of_processes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Accumulation is shown, not fixed: 64 = 16 x 1 x 4 here, 16 x 2 x 2 there."""
    text = print_config(["--micro-batch-size", "16", "--global-batch-size", "64"], capsys)
    assert read_back(text, tmp_path, world_size=2)["gradient_accumulation_steps"] == 2


def test_broken_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--lr", "-1", "--print-config"]) == 1
    captured = capsys.readouterr()
    assert "--lr must not be negative" in captured.err
    assert captured.out == ""
