"""What ``from rapidformer import ...`` gives, and that asking for help does not wait for torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rapidformer

# Every name that the documents' scripts import, and the older name of one.
SEED_NAMES = [
    "RapidformerEngine",
    "Finetuner",
    "PreTrainer",
    "Pretrainer",
    "get_args",
    "get_logger",
    "get_timers",
    "get_tokenizer",
    "get_ltor_masks_and_position_ids",
    "build_train_valid_test_datasets",
    "build_train_valid_test_datasets_for_huggingface",
    "build_pretrain_huggingface_bert_datasets",
    "mpu",
    "GPTModel",
]


@pytest.mark.parametrize("name", SEED_NAMES)
def test_names_of_the_seeds(name: str) -> None:
    assert getattr(rapidformer, name) is not None
    assert name in rapidformer.__all__
    assert name in dir(rapidformer)


def test_every_public_name_is_there() -> None:
    for name in rapidformer.__all__:
        assert getattr(rapidformer, name) is not None
    namespace: dict[str, object] = {}
    exec("from rapidformer import *", namespace)
    assert set(rapidformer.__all__) <= namespace.keys()
    assert rapidformer.Pretrainer is rapidformer.PreTrainer


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        _ = rapidformer.Nonsense


def test_arguments_and_timers_need_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from rapidformer import context

    monkeypatch.setattr(context, "_current", context._Context())
    for name in ("get_args", "get_timers", "get_tokenizer"):
        with pytest.raises(rapidformer.RapidformerError, match=r"call RapidformerEngine\(\) first"):
            getattr(rapidformer, name)()


def test_later_engine_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from rapidformer import context
    from rapidformer.config import parse_arguments
    from rapidformer.timers import Timers

    monkeypatch.setattr(context, "_current", context._Context())
    for rate in (1.0, 2.0):
        timers = Timers()
        context.set_context(args=parse_arguments(["--lr", str(rate)]), timers=timers)
        assert rapidformer.get_args().lr == rate
        assert rapidformer.get_timers() is timers


def test_tokenizer_is_made_once_and_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from rapidformer import context
    from rapidformer.config import parse_arguments
    from rapidformer.timers import Timers

    monkeypatch.setattr(context, "_current", context._Context())
    made: list[object] = []
    context.set_context(
        args=parse_arguments([]),
        timers=Timers(),
        build_tokenizer=lambda: made.append(object()) or made[-1],
    )
    assert not made
    assert rapidformer.get_tokenizer() is rapidformer.get_tokenizer() is made[0]
    assert len(made) == 1


HEAVY = "torch transformers datasets numpy rich yaml"


@pytest.mark.parametrize(
    "statement",
    [
        "import rapidformer; assert 'rapidformer.config' not in sys.modules",
        "import rapidformer.cli.main, rapidformer.tasks.registry",
        "from rapidformer.tasks.registry import list_tasks; list_tasks()",
        "from rapidformer.config import parse_arguments, resolve; resolve(parse_arguments([]))",
        "from rapidformer.cli.main import main; main(['--help'])",
        "from rapidformer.cli.main import main; main(['tasks'])",
        "from rapidformer.cli.main import main; main(['--no-such-flag'])",
        "from rapidformer.cli.main import main; main(['preprocess', '--help'])",
        "from rapidformer.cli.main import main; main(['data', '--help'])",
        "from rapidformer.launch.environment import plan_launch; import rapidformer.launch.local",
        "from rapidformer import get_args, get_logger, get_timers, RapidformerError",
    ],
)
def test_nothing_heavy_is_imported(statement: str) -> None:
    code = f"""
import sys
{statement}
loaded = [name for name in {HEAVY.split()!r} if name in sys.modules]
assert not loaded, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_types_ship() -> None:
    assert (Path(rapidformer.__file__).parent / "py.typed").is_file()
