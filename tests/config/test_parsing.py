"""Command lines and YAML files: forms, precedence, and every problem told at once."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import pickle
from pathlib import Path

import pytest

from rapidformer.config import (
    Settings,
    arguments_from_mapping,
    objective_sections,
    parse_arguments,
    sections,
    task_sections,
)
from rapidformer.config.validate import find_problems
from rapidformer.errors import ConfigurationError, RapidformerError


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems_of(words: list[str]) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        parse_arguments(words)
    return caught.value.problems


@pytest.mark.parametrize(
    "words",
    [
        ["--micro-batch-size", "4"],
        ["--micro_batch_size", "4"],
        ["--micro-batch-size=4"],
        ["--micro_batch_size=4"],
        ["--per-device-train-batch-size=4"],
        ["--per_device_train_batch_size", "4"],
        ["--batch-size", "4e0"],
    ],
)
def test_forms_of_a_flag(words: list[str]) -> None:
    args = parse_arguments(words)
    assert args.micro_batch_size == 4
    assert args.sources["micro_batch_size"] == "command line"


def test_value_after_equals_keeps_its_underscores() -> None:
    assert parse_arguments(["--data_path=my_data_set"]).data_path == "my_data_set"
    assert parse_arguments(["--save", "--no_such"[2:]]).save == "no_such"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--compile"], True),
        (["--compile", "true"], True),
        (["--compile=false"], False),
        (["--compile", "off"], False),
        (["--no-compile"], False),
        (["--no_compile"], False),
        (["--compile", "--no-compile"], False),
        (["--no-compile", "--compile"], True),
        (["--torch-compile"], True),
        (["--no-torch-compile"], False),
    ],
)
def test_switch_forms(words: list[str], value: bool) -> None:
    assert parse_arguments(words).compile is value


@pytest.mark.parametrize("words", [["--no-group-texts"], ["--no_group_texts"], ["--group-texts=0"]])
def test_switch_that_is_on_by_default(words: list[str]) -> None:
    assert parse_arguments([]).group_texts is True
    assert parse_arguments(words).group_texts is False


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], None),
        (["--mixed-precision"], "auto"),
        (["--mixed-precision", "fp16"], "fp16"),
        (["--mixed-precision=BF16"], "bf16"),
        (["--mixed_precision", "--compile"], "auto"),
    ],
)
def test_mixed_precision_is_a_switch_with_kinds(words: list[str], value: str | None) -> None:
    assert parse_arguments(words).mixed_precision == value


def test_mixed_precision_has_a_no_form_as_the_help_promises() -> None:
    """'Every switch has a --no- form'; needed to switch off what a YAML file switches on."""
    assert parse_arguments(["--mixed-precision", "--no-mixed-precision"]).mixed_precision is None


@pytest.mark.parametrize(
    ("text", "value"), [("true", "auto"), ("false", None), ("fp16", "fp16"), ("null", None)]
)
def test_mixed_precision_in_yaml(text: str, value: str | None, tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", f"mixed_precision: {text}\n")
    assert parse_arguments(["--config", file]).mixed_precision == value


def test_lists() -> None:
    args = parse_arguments(["--train-data", "a.json", "b.json", "--lr", "1"])
    assert args.train_data == ["a.json", "b.json"]
    assert arguments_from_mapping({"train_data": "a.json,b.json"}).train_data == [
        "a.json",
        "b.json",
    ]
    assert arguments_from_mapping({"train_data": ["a.json"]}).train_data == ["a.json"]


def test_whole_numbers() -> None:
    assert parse_arguments(["--train-iters", "1e3"]).train_iters == 1000
    assert parse_arguments(["--train-iters", "1_000"]).train_iters == 1000
    # A large seed must not pass through a float.
    assert parse_arguments(["--seed", "9007199254740993"]).seed == 9007199254740993
    assert parse_arguments(["--seed", "-3"]).seed == -3


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--train-iters", "ten"], "--train-iters needs a whole number, got 'ten'"),
        (["--train-iters", "2.5"], "--train-iters needs a whole number, got '2.5'"),
        (["--train-iters", "inf"], "--train-iters needs a whole number, got 'inf'"),
        (["--lr", "fast"], "--lr needs a number, got 'fast'"),
        (["--compile", "maybe"], "--compile is a switch and takes true or false, got 'maybe'"),
        (
            ["--lr-decay-style", "square"],
            "--lr-decay-style must be one of constant, linear, cosine, inverse-square-root, "
            "got 'square'",
        ),
    ],
)
def test_values_of_another_type(words: list[str], reason: str) -> None:
    assert problems_of(words) == [reason + "."]


def test_choices_are_read_in_any_spelling() -> None:
    assert parse_arguments(["--lr-decay-style", "Inverse_Square_Root"]).lr_decay_style == (
        "inverse-square-root"
    )


# ---- precedence ------------------------------------------------------------------------------


def test_flag_over_yaml_over_default(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "lr: 2e-5\nclip_grad: 0.5\nseed: 7\n")
    args = parse_arguments(["--config", file, "--clip-grad", "2"])
    assert (args.lr, args.clip_grad, args.seed, args.weight_decay) == (2e-5, 2.0, 7, 0.01)
    assert args.sources == {
        "lr": file,
        "seed": file,
        "clip_grad": "command line",
        "config": "command line",
    }
    assert args.is_given("lr")
    assert not args.is_given("weight_decay")


def test_flag_in_another_dialect_wins_over_yaml(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "lr: 1\ncompile: true\n")
    args = parse_arguments(["--learning-rate", "2", "--config", file, "--no-compile"])
    assert (args.lr, args.compile) == (2.0, False)


def test_yaml_keys_may_have_dashes_and_no_forms(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "micro-batch-size: 3\nno_load_optim: true\n")
    args = parse_arguments(["--config", file])
    assert args.micro_batch_size == 3
    assert args.load_optim is False
    assert args.no_load_optim is True


@pytest.mark.parametrize("name", ["seed", "weight_decay", "clip_grad", "log_interval", "split"])
def test_empty_yaml_value_never_becomes_none_where_a_value_is_needed(
    name: str, tmp_path: Path
) -> None:
    """`seed:` with nothing behind it: the default or an error, not None that crashes later."""
    file = write(tmp_path / "a.yaml", f"{name}:\n")
    try:
        args = parse_arguments(["--config", file])
    except ConfigurationError as error:
        assert name in str(error)
    else:
        assert getattr(args, name) is not None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- a\n- b\n", "must contain `name: value` lines"),
        ("lr: [1\n", "is not valid YAML"),
        ("lr: [1, 2]\n", "takes one value, got 2"),
    ],
)
def test_bad_yaml(text: str, reason: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", text)
    (problem,) = problems_of(["--config", file])
    assert reason in problem
    assert file in problem


def test_missing_yaml_file(tmp_path: Path) -> None:
    (problem,) = problems_of(["--config", str(tmp_path / "none.yaml")])
    assert "none.yaml cannot be read: No such file or directory" in problem


def test_empty_yaml_file_means_defaults(tmp_path: Path) -> None:
    assert parse_arguments(["--config", write(tmp_path / "a.yaml", "")]).lr is None


def test_yaml_cannot_run_code(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    file = write(tmp_path / "a.yaml", f"save: !!python/object/apply:os.mkdir ['{mark}']\n")
    assert "not valid YAML" in problems_of(["--config", file])[0]
    assert not mark.exists()


# ---- what is wrong is said ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("--micro-batchsize", "--micro-batch-size"),
        ("--learning-rat", "--learning-rate"),
        ("--zero1-memory-optimization", "--zero-1-memory-optimization"),
        ("--epoch=3", "--epochs"),
        ("--mixed-precison", "--mixed-precision"),
    ],
)
def test_unknown_flag_names_the_nearest(word: str, near: str) -> None:
    (problem,) = problems_of([word])
    assert problem == f"unknown flag {word.partition('=')[0]}: did you mean {near}?"


def test_unknown_flag_without_a_neighbour_points_to_help() -> None:
    (problem,) = problems_of(["--xyzzyqqq", "5"])
    assert problem == "unknown flag --xyzzyqqq: `rapidformer --help all` lists all flags."


def test_abbreviations_are_not_guessed() -> None:
    (problem,) = problems_of(["--micro-batch", "4"])
    assert "unknown flag --micro-batch" in problem


def test_word_without_a_flag() -> None:
    (problem,) = problems_of(["--lr", "1", "stray"])
    assert "stray" in problem


def test_unknown_yaml_key_names_the_nearest(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "learning_rat: 1\nlr: 2\n")
    assert problems_of(["--config", file]) == [
        f"unknown setting learning_rat in {file}: did you mean learning_rate?"
    ]


def test_unknown_name_in_code_and_as_attribute() -> None:
    with pytest.raises(ConfigurationError, match="unknown setting epoch in code: did you mean epo"):
        arguments_from_mapping({"epoch": 3})
    with pytest.raises(AttributeError, match="no setting 'epoch'; did you mean 'epochs'"):
        _ = parse_arguments([]).epoch


def test_all_problems_of_a_command_line_are_reported_at_once(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "seeed: 1\nhysteresis: many\n")
    words = ["--lr", "fast", "--epoch", "3", "--config", file, "--compile=maybe", "--zzzzqqq"]
    problems = problems_of(words)
    assert len(problems) == 6
    text = "\n".join(problems)
    for part in ("--lr", "--epoch:", "seeed", "hysteresis in", "--compile", "--zzzzqqq"):
        assert part in text
    with pytest.raises(RapidformerError, match=r"^6 problems:\n  - "):
        parse_arguments(words)


def test_flag_without_its_value() -> None:
    assert problems_of(["--lr", "--cuda-graph", "--lora-target-modules"]) == [
        "--lr needs a value.",
        "--cuda-graph needs a value (one of auto, on, off).",
        "--lora-target-modules needs a value.",
    ]


# ---- the object itself ---------------------------------------------------------------------


def test_arguments_cannot_be_changed() -> None:
    args = parse_arguments(["--lr", "1"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.lr = 2.0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.new_name = 2.0  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del args.lr
    changed = args.replace("test", lr=2.0)
    assert (args.lr, changed.lr) == (1.0, 2.0)
    assert (args.sources["lr"], changed.sources["lr"]) == ("command line", "test")


def test_replacing_with_the_same_value_keeps_the_origin() -> None:
    args = parse_arguments(["--lr", "1"]).replace("derived: test", lr=1.0)
    assert args.sources["lr"] == "command line"
    assert args.is_given("lr")


def test_arguments_survive_copy_and_pickle() -> None:
    args = parse_arguments(["--lr", "1", "--DDP-impl", "local"])
    for twin in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert twin == args
        assert twin.DDP_impl == "local"
        assert twin.dataset_path is None


# ---- the user's own flags --------------------------------------------------------------------


def add_own_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group(title="mine")
    group.add_argument("--top_k", type=int, default=5)
    group.add_argument("--out-seq-length", type=int, default=1024)
    group.add_argument("--greedy", action="store_true")
    group.add_argument("--label_desc", nargs="+")
    return parser


def test_extra_flags_with_and_without_underscores() -> None:
    args = parse_arguments(
        ["--top_k", "3", "--out_seq_length=7", "--greedy", "--lr", "1", "--label_desc", "a", "b"],
        add_own_flags,
    )
    assert (args.top_k, args.out_seq_length, args.greedy) == (3, 7, True)
    assert args.label_desc == ["a", "b"]
    assert args.lr == 1.0
    assert set(args.extras) == {"out_seq_length", "greedy", "label_desc"}
    assert find_problems(args) == [], "--top_k is the script's, though we have one too"


def test_extra_flags_have_their_defaults() -> None:
    args = parse_arguments([], add_own_flags)
    assert (args.top_k, args.out_seq_length, args.greedy, args.label_desc) == (5, 1024, False, None)


def test_provider_may_return_nothing() -> None:
    def provider(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--mine", type=float)

    assert parse_arguments(["--mine", "0.5"], provider).mine == 0.5


def test_bad_value_of_an_extra_flag_is_a_clear_error() -> None:
    with pytest.raises(ConfigurationError, match="--top_k: invalid int value: 'x'"):
        parse_arguments(["--top_k", "x"], add_own_flags)


def test_unknown_flag_may_be_near_an_extra_one() -> None:
    with pytest.raises(ConfigurationError, match="did you mean --out-seq-length"):
        parse_arguments(["--out-seq-lenth", "3"], add_own_flags)


def test_extra_flags_do_not_leak_into_the_next_parse() -> None:
    parse_arguments(["--greedy"], add_own_flags)
    with pytest.raises(ConfigurationError, match="unknown flag --greedy"):
        parse_arguments(["--greedy"])


def test_settings_are_of_every_section() -> None:
    modules = (sections, task_sections, objective_sections)
    members = [member for module in modules for member in vars(module).values()]
    classes = {member for member in members if dataclasses.is_dataclass(member)}
    assert set(Settings.__bases__) == classes
