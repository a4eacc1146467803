"""Dialects live in one room: nothing outside knows them, and importing one changes nothing."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rapidformer
from rapidformer import Seq2SeqTrainingArguments, Trainer, TrainingArguments
from rapidformer.dialects import flagai, mindformers
from rapidformer.errors import ConfigurationError
from tests.dialects.small import make_classifier
from tests.processes import PATIENCE

ROOT = Path(rapidformer.__file__).parent
# A system's name, and the classes and functions that its scripts import.
WORDS = re.compile(
    r"flagai|mindformers|mindspore|easynlp|megatron|init_context|(?<!\w)accelerate(?!\w)|\btrl\b"
    r"|sentence_transformers|(?-i:\b\w*Accelerator\b|\b(?!\w*Pre)\w*Trainer\b"
    r"|\b\w*TrainingArguments\b|CrossEncoder|SentenceTransformer)",
    re.IGNORECASE,
)
STEMS = (
    "flagai", "mindformers", "mindspore", "easynlp", "megatron", "init_context", "accelerat", "trl",
    "sentence_transformers", "trainer", "trainingarguments", "crossencoder", "sentencetransformer",
)  # fmt: skip
"""One is in each of the words, which take long to search a line for."""
# Where a word is not a dialect's, each with the reason.
ALLOWED = {
    "__init__.py": "the public names, and where those that have moved are",
    "data/": "Megatron's .bin/.idx files, and the samples made of them: a file format",
    "cli/data.py": "the same file format",
    "cli/preprocess.py": "the same file format",
    "models/gpt/": "a model that is called the way Megatron's is",
    "tasks/pretraining/": "the objectives for that file format and that model",
    "tasks/embedding/": "folders that sentence-transformers reads: a file format",
    "cli/run_model.py": "the same file format",
    "training/summary.py": "names the program that needs an adapter merged",
    "tasks/preference/": "metrics and their names are those that reports of preferences have",
    "tasks/grpo/rollouts.py": "the same",
    "config/task_names.py": "what users call a task",
    "benchmarking/benched_run.py": "times transformers' own Trainer, to compare with",
    "cli/bench.py": "says what it compares with",
    "cli/config.py": "hands its first question to the dialogue of Accelerate's users",
    "cli/train.py": "a user's script may import Megatron's names",
    "models/side_effects/pure_calls.py": "Accelerate as an installed library",
    "checkpoint/export.py": "Accelerate as an installed library",
}


@functools.cache
def find_words() -> dict[str, list[str]]:
    """The dialects' words outside their room, by file."""
    places: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("dialects/"):
            lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if matches := [f"{number}: {line}" for number, line in lines if has_word(line)]:
                places[name] = matches
    return places


def has_word(line: str) -> bool:
    lower = line.lower()
    return any(stem in lower for stem in STEMS) and WORDS.search(line) is not None


def test_a_line_is_searched_for_every_word() -> None:
    """Those of our own scripts and docs, which name all of the systems."""
    root = ROOT.parents[1]
    texts = [*(root / "docs").rglob("*.md"), *(root / "tests" / "dialects").rglob("*.py")]
    lines = [line for path in texts for line in path.read_text("utf-8").splitlines()]
    assert all(has_word(line) for line in lines[::7] if WORDS.search(line))


def test_nothing_outside_knows_a_dialect() -> None:
    places = find_words()
    leaks = {n: lines for n, lines in places.items() if not n.startswith(tuple(ALLOWED))}
    assert not leaks, "\n".join(f"{name}:{line}" for name in leaks for line in leaks[name])


def test_every_exception_is_still_needed() -> None:
    names = find_words()
    assert all(any(name.startswith(place) for name in names) for place in ALLOWED)


def test_importing_changes_nothing(python: Path) -> None:
    """Neither the environment nor how modules are found, under MindSpore's launcher either."""
    packages = """
import os, sys
before = dict(os.environ), list(sys.meta_path), list(sys.path)
import rapidformer
import rapidformer.dialects.flagai, rapidformer.dialects.flags, rapidformer.dialects.mindformers
assert (dict(os.environ), list(sys.meta_path), list(sys.path)) == before
"""
    # These import torch, which the other Python has done: that is not about us.
    names = """
from rapidformer.dialects.mindformers import Trainer, TrainingArguments, init_context
assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & os.environ.keys()
assert not [f for f in sys.meta_path if type(f).__module__.startswith("rapidformer")]
assert "megatron" not in sys.modules
"""
    taken = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    variables = {name: value for name, value in os.environ.items() if name not in taken}
    for words in ([sys.executable, "-c", packages], [python, "-c", packages + names]):
        done = subprocess.run(
            words, env={**variables, "RANK_ID": "0", "RANK_SIZE": "2"},
            capture_output=True, text=True, check=False, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("positional", "named", "line"),
    [
        ((), {"env_type": "pytorch", "epochs": 1, "lr": 1e-3}, "flagai import Trainer"),
        ((), {"batch_size": 2, "tokenizer": object()}, "flagai import Trainer"),
        ((), {"task": "text_generation", "model": "gpt2"}, "mindformers import Trainer"),
        ((), {"model": "gpt2"}, "mindformers import Trainer"),
        ((), {"args": "run_gpt2.yaml"}, "mindformers import Trainer"),
        ((None, "text_generation", "gpt2"), {}, "mindformers import Trainer"),
        ((), {"pet_method": "lora", "model": make_classifier()}, "mindformers import Trainer"),
    ],
)
def test_the_old_spelling_gets_the_import_line(
    positional: tuple[Any, ...], named: dict[str, Any], line: str
) -> None:
    for cls in (Trainer, type("MyTrainer", (Trainer,), {})):
        with pytest.raises(ConfigurationError, match=f"`from rapidformer.dialects.{line}`"):
            cls(*positional, **named)


def test_arguments_of_mindformers_need_its_trainer() -> None:
    arguments = mindformers.TrainingArguments(use_cpu=True)
    for positional in ((make_classifier(), arguments), (arguments, "text_generation")):
        with pytest.raises(ConfigurationError, match="mindformers import Trainer`"):
            Trainer(*positional)


def test_old_arguments_get_the_import_line() -> None:
    for cls in (TrainingArguments, Seq2SeqTrainingArguments):
        with pytest.raises(ConfigurationError) as error:
            cls(batch_size=2, sink_size=2)
    expected = "batch_size, sink_size: that is for MindFormers' TrainingArguments. Write `from "
    assert expected + "rapidformer.dialects.mindformers import TrainingArguments`" in str(
        error.value
    )
    with pytest.raises(TypeError, match="nonsense"):
        TrainingArguments(nonsense=1)


@pytest.mark.parametrize("name", ["init_context", "ContextConfig", "ParallelContextConfig"])
def test_old_imports_get_the_import_line(name: str) -> None:
    with pytest.raises(ImportError, match=f"from rapidformer.dialects.mindformers import {name}`"):
        exec(f"from rapidformer import {name}")
    assert name not in rapidformer.__all__


def test_names_of_each_dialect() -> None:
    for room in (flagai, mindformers):
        assert [name for name in room.__all__ if getattr(room, name) is None] == []
        with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
            _ = room.Nonsense
    assert issubclass(flagai.Trainer, Trainer) and issubclass(mindformers.Trainer, Trainer)
    assert issubclass(mindformers.TrainingArguments, TrainingArguments)
