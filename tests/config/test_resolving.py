"""Rules between settings, and what follows from them: above all the batch arithmetic."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer.config import arguments_from_mapping, parse_arguments, resolve
from rapidformer.errors import ConfigurationError

sizes = st.none() | st.integers(1, 24)


def problems_of(*words: str, world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        resolve(parse_arguments(words), world_size=world_size)
    return caught.value.problems


@settings(max_examples=300, deadline=None)
@given(micro=sizes, total=sizes, steps=sizes, world=st.integers(1, 6))
def test_global_is_micro_times_processes_times_accumulation(
    micro: int | None, total: int | None, steps: int | None, world: int
) -> None:
    given_values = {
        "micro_batch_size": micro,
        "global_batch_size": total,
        "gradient_accumulation_steps": steps,
    }
    said = {name: value for name, value in given_values.items() if value is not None}
    try:
        args = resolve(arguments_from_mapping(said), world_size=world)
    except ConfigurationError as error:
        check_that_the_message_helps(str(error), said, world)
        return
    assert args.global_batch_size == (
        args.micro_batch_size * args.data_parallel_size * args.gradient_accumulation_steps
    )
    assert args.data_parallel_size == world
    if steps is None and micro and total and micro * world > total:
        said["micro_batch_size"] = total // world
    for name, value in said.items():
        assert getattr(args, name) == value, "nothing else that the user said is changed"


def check_that_the_message_helps(message: str, said: dict[str, int], world: int) -> None:
    """The numbers that an error proposes must work."""
    proposed = re.search(r"use (\d+)(?: or (\d+))?", message)
    if proposed is None:
        assert "disagree" in message
        needed = int(re.search(r"= (\d+)", message)[1])  # type: ignore[index]
        numbers = [needed]
    else:
        numbers = [int(number) for number in proposed.groups() if number]
    assert said["global_batch_size"] not in numbers
    for number in numbers:
        args = resolve(
            arguments_from_mapping({**said, "global_batch_size": number}), world_size=world
        )
        assert args.global_batch_size == number


def test_batch_that_does_not_divide_says_its_numbers() -> None:
    (problem,) = problems_of("--micro-batch-size", "16", "--global-batch-size", "100", world_size=4)
    assert problem == (
        "--global-batch-size 100 is not a multiple of --micro-batch-size 16 x 4 data-parallel "
        "ranks = 64: use 64 or 128."
    )
    # A micro-batch may be reduced, so any multiple of the ranks will do.
    (problem,) = problems_of("--micro-batch-size", "16", "--global-batch-size", "6", world_size=4)
    assert problem == (
        "--global-batch-size 6 is not a multiple of 4 data-parallel ranks: use 4 or 8."
    )


@pytest.mark.parametrize(
    ("said", "world", "expected"),
    [
        ({"micro_batch_size": 16, "global_batch_size": 64}, 4, (16, 64, 1)),
        ({"micro_batch_size": 16, "global_batch_size": 128}, 4, (16, 128, 2)),
        ({"micro_batch_size": 16, "global_batch_size": 16}, 4, (4, 16, 1)),
        ({"micro_batch_size": 4}, 3, (4, 12, 1)),
        ({"global_batch_size": 12}, 3, (4, 12, 1)),
        ({"global_batch_size": 12, "gradient_accumulation_steps": 2}, 3, (2, 12, 2)),
        ({"micro_batch_size": 4, "gradient_accumulation_steps": 5}, 2, (4, 40, 5)),
        ({}, 2, (8, 16, 1)),
    ],
)
def test_two_numbers_give_the_third(
    said: dict[str, int], world: int, expected: tuple[int, int, int]
) -> None:
    args = resolve(arguments_from_mapping(said), world_size=world)
    assert (
        args.micro_batch_size,
        args.global_batch_size,
        args.gradient_accumulation_steps,
    ) == expected
    assert args.eval_micro_batch_size == args.micro_batch_size


def test_resolving_twice_changes_nothing() -> None:
    words = ["--task", "masked_lm", "--dataset-name", "glue", "--fp16", "--checkpoint-activations"]
    once = resolve(parse_arguments(words), world_size=2, rank=1)
    twice = resolve(once, world_size=2, rank=1)
    assert twice == once
    assert (once.rank, once.world_size) == (1, 2)


def test_resolving_leaves_the_given_arguments_alone() -> None:
    args = parse_arguments(["--fp16"])
    resolve(args, world_size=2)
    assert args.mixed_precision is None
    assert args.micro_batch_size is None
    assert args.world_size == 1


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--fp16"], "mixed_precision", "fp16"),
        (["--bf16"], "mixed_precision", "bf16"),
        (["--onnx-runtime-training"], "compile", True),
        (["--checkpoint-activations"], "recompute_granularity", "full"),
        (["--recompute-activations"], "recompute_granularity", "full"),
        (["--recompute-granularity", "selective"], "checkpoint_activations", True),
        (["--pretrained-model-name-or-path", "bert"], "load", "bert"),
        (["--pretrained-model-name-or-path", "bert", "--load", "other"], "load", "other"),
        (["--dataset-name", "glue"], "data_path", "glue"),
        (["--dataset-name", "glue"], "data_name", None),
        (["--data-path", "glue", "--dataset-name", "mrpc"], "data_name", "mrpc"),
        (["--data-dir", "glue", "--data-name", "mrpc"], "data_path", None),
        (["--task", "masked_lm"], "lr", 5e-5),
        (["--task", "masked_lm", "--lr", "1"], "lr", 1.0),
        (["--task", "masked_lm"], "epochs", 3),
        (["--task", "masked_lm", "--train-iters", "9"], "epochs", None),
        ([], "lr", None),
        ([], "local_rank", 0),
    ],
)
def test_what_follows(words: list[str], name: str, value: object) -> None:
    args = resolve(parse_arguments(words))
    assert getattr(args, name) == value
    if f"--{name.replace('_', '-')}" not in words:
        assert not args.is_given(name) or name == "data_name"


def test_launchers_local_rank_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert resolve(parse_arguments(["--local_rank", "1"])).local_rank == 3
    monkeypatch.delenv("LOCAL_RANK")
    assert resolve(parse_arguments(["--local_rank", "1"])).local_rank == 1


# ---- rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--micro-batch-size 0", "--micro-batch-size must be at least 1, got 0."),
        ("--epochs -1", "--epochs must not be negative, got -1."),
        ("--lr nan", "--lr must be a number, got nan."),
        ("--mask-prob 1.5", "--mask-prob must be at least 0 and below 1, got 1.5."),
        ("--adam-beta2 1", "--adam-beta2 must be at least 0 and below 1, got 1.0."),
        ("--lr 1e-5 --min-lr 1e-4", "--min-lr 0.0001 is above --lr 1e-05."),
        (
            "--lr-warmup-iters 5 --lr-warmup-fraction .1",
            "--lr-warmup-iters and --lr-warmup-fraction set the same thing: give only one of them.",
        ),
        (
            "--train-iters 5 --train-samples 10",
            "--train-iters and --train-samples set the same thing: give only one of them.",
        ),
        (
            "--lr-decay-iters 5 --lr-decay-samples 10",
            "--lr-decay-iters and --lr-decay-samples set the same thing: give only one of them.",
        ),
        (
            "--lr-decay-iters 5 --lr-warmup-iters 5",
            "--lr-warmup-iters 5 must be below --lr-decay-iters 5.",
        ),
        (
            "--seq-length 512 --max-position-embeddings 128",
            "--seq-length 512 is above --max-position-embeddings 128.",
        ),
        ("--fp16 --bf16", "--fp16 and --bf16 exclude each other: give only one of them."),
        (
            "--fp16 --mixed-precision bf16",
            "--mixed-precision bf16 and --fp16 exclude each other: give only one of them.",
        ),
        (
            "--hidden-size 10 --num-attention-heads 4",
            "--num-attention-heads 4 does not divide --hidden-size 10.",
        ),
        ("--user-script nowhere.py", "--user-script nowhere.py is not a file."),
        ("--vocab-file nowhere.txt", "--vocab-file nowhere.txt is not a file."),
        ("--load ./nowhere", "--load ./nowhere: no such folder."),
        (
            "--chat-template-kwargs [1]",
            "--chat-template-kwargs [1]: give a JSON object, such as "
            "'{\"enable_thinking\": false}'.",
        ),
        (
            '--chat-template-kwargs {"tools":[]}',
            "--chat-template-kwargs: tools is set for each row and cannot be given.",
        ),
    ],
)
def test_broken_rule(words: str, text: str) -> None:
    assert problems_of(*words.split()) == [text]


def test_two_zero_stages_exclude_each_other() -> None:
    (problem,) = problems_of("--zero-1-memory-optimization", "--zero-3-memory-optimization")
    assert "--zero-1-memory-optimization and --zero-3-memory-optimization exclude" in problem


def test_shares_of_every_axis_must_fit_the_processes() -> None:
    words = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    (problem,) = problems_of(*words, world_size=6)
    assert problem.startswith(
        "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2 = 4 does not divide the "
        "6 ranks of this run"
    )
    layout = ["--model-parallel", "2", "--pipeline-parallel", "2", "--data-parallel", "2"]
    (problem,) = problems_of(*layout, world_size=4)
    assert problem.endswith("use --data-parallel 1, or start 8 ranks (--nproc-per-node).")
    (problem,) = problems_of("--expert-model-parallel-size", "3", world_size=4)
    assert problem.endswith("the 4 ranks with different tokens: use 1 or 2 or 4.")


def test_processes_that_share_layers_see_the_same_rows() -> None:
    args = resolve(
        parse_arguments(["--tensor-model-parallel-size", "2", "--micro-batch-size", "3"]),
        world_size=4,
    )
    assert (args.data_parallel_size, args.global_batch_size) == (2, 6)


def test_a_tensor_parallel_size_that_does_not_fit_is_refused() -> None:
    (problem,) = problems_of("--tensor-model-parallel-size", "2", world_size=1)
    assert problem == (
        "--tensor-model-parallel-size 2 needs a multiple of 2 ranks, and this run has one: start "
        "more with --nproc-per-node 2."
    )
    (problem,) = problems_of("--tensor-model-parallel-size", "4", world_size=6)
    assert problem == (
        "--tensor-model-parallel-size 4 does not divide the 6 ranks of this run: use 1 or 2 or "
        "3 or 6, or start a multiple of 4 ranks (--nproc-per-node)."
    )
    (problem,) = problems_of(
        "--tensor-model-parallel-size", "3", "--num-attention-heads", "16", world_size=3
    )
    assert problem == (
        "--tensor-model-parallel-size 3 does not divide the 16 attention heads of "
        "--num-attention-heads: use 1, 2, 4, 8 or 16."
    )


def test_a_hub_name_given_to_load_is_no_missing_folder() -> None:
    assert resolve(parse_arguments(["--load", "google/bert"])).load == "google/bert"


def test_every_broken_rule_is_in_one_error() -> None:
    problems = problems_of(
        "--lr", "-1", "--fp16", "--bf16", "--micro-batch-size", "0", "--seq-length", "9",
        "--max-position-embeddings", "4", "--user-script", "nowhere.py",
    )  # fmt: skip
    assert len(problems) >= 5


def test_batch_arithmetic_is_reported_together_with_other_broken_rules() -> None:
    """Nobody should mend a command line one error at a time."""
    problems = problems_of(
        "--fp16", "--bf16", "--micro-batch-size", "3", "--global-batch-size", "7"
    )
    assert len(problems) == 2
    assert any("--global-batch-size 7 is not a multiple" in problem for problem in problems)


@pytest.mark.parametrize(
    "words",
    ["--lr-decay-iters -5", "--lr-decay-samples -5", "--loss-scale 0", "--initial-loss-scale 0"],
)
def test_numbers_that_make_no_sense_are_refused(words: str) -> None:
    (problem,) = problems_of(*words.split())
    assert problem.startswith(words.split()[0])


def test_warmup_fraction_of_zero_does_not_silence_warmup_iters() -> None:
    """Hugging Face scripts pass warmup_ratio=0.0 beside warmup_steps=100: the steps count."""
    from rapidformer.optim.schedule import build_curve

    args = resolve(arguments_from_mapping({"lr": 1.0, "warmup_ratio": 0.0, "warmup_steps": 10}))
    curve = build_curve(args, train_iters=100, count_samples=lambda updates: updates * 1)
    assert curve(5) == pytest.approx(0.5)
