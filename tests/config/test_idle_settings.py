"""A setting without effect is reported with the reason; one with effect is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rapidformer.config import parse_arguments, resolve
from rapidformer.config.schema import get_settings, render_arguments
from rapidformer.engine.unused_settings import find_idle_settings
from rapidformer.tasks.registry import PRETRAINING, describe_unused_flags, get_task, list_tasks


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--recompute-interval 2", "--recompute-interval has no effect without --checkpoint"),
        ("--compile-backend eager", "without --compile"),
        ("--save-interval 5 --save none", "with --save none"),
        ("--overwrite", "without --save"),
        ("--hysteresis 3 --bf16", "without --mixed-precision fp16"),
        ("--min-lr 1e-6 --lr 1e-3 --lr-decay-style constant", "--lr-decay-style constant"),
        ("--micro-batch-size 16 --global-batch-size 4", "on 1 data-parallel rank: 4 is used"),
        ("--epochs 3 --train-iters 10", "--train-iters 10 overrides it"),
        ("--sequence-parallel", "no effect without --tensor-model-parallel-size"),
    ],
)
def test_idle_settings_are_named(flags: str, message: str) -> None:
    idle = find_idle_settings(resolve(parse_arguments(flags.split())))
    assert len(idle) == 1 and message in idle[0]


@pytest.mark.parametrize(
    "flags",
    [
        "--recompute-interval 2 --checkpoint-activations",
        "--onnx-runtime-training --compile-backend eager",
        "--save-interval 5 --save x",
        "--save-interval 5",
        "--hysteresis 3 --fp16",
        "--epochs 3",
    ],
)
def test_settings_with_effect_are_not(flags: str) -> None:
    assert find_idle_settings(resolve(parse_arguments(flags.split()))) == []


@pytest.mark.parametrize(
    ("flags", "unused"),
    [
        ("--task qa --packing --label-column x", "--label-column, --packing"),
        ("--task causal_lm --packing --tools-column x --text-column y", None),
        ("--task causal_lm --context-column x --mask-prob 0.2", "--mask-prob"),
        ("--task seq2seq_lm --source-prefix x --target-column y --length-column z", None),
    ],
)
def test_flags_of_other_tasks(flags: str, unused: str | None) -> None:
    args = parse_arguments(flags.split())
    task = get_task(args.task or "")
    expected = unused and f"no effect with --task {task.name}: {unused}."
    assert describe_unused_flags(args, task) == expected


def test_a_file_with_every_default_is_not_about_them(tmp_path: Path) -> None:
    """As ``--config runs/mrpc/arguments.yaml`` is, which repeats a run."""
    file = tmp_path / "arguments.yaml"
    run = resolve(parse_arguments(["--task", "masked_lm"]))
    file.write_text("\n".join(render_arguments(run)))
    args = parse_arguments(["--config", str(file)])
    assert args.is_given("packing") and args.is_given("hysteresis")
    assert find_idle_settings(resolve(args)) == []
    assert describe_unused_flags(args, get_task("masked_lm")) is None


def test_settings_of_particular_tasks_name_them() -> None:
    settings = get_settings().values()
    names = {task.name for task in list_tasks()} | {PRETRAINING}
    assert {name for setting in settings for name in setting.tasks} <= names
    for setting in settings:
        # The tasks come from the field: a prefix written by hand would not reach the warning.
        first = setting.help.split(":")[0].split(", ")
        assert set(first) & names == set(setting.tasks), setting.flag
