"""The same losses however a run is cut: micro-batches, processes, black or white box, resumed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rapidformer.cli.main import main
from tests.processes import run_in_kept_processes
from tests.tasks.pretraining.corpus import LENGTH, SIZES, get_losses

pytestmark = pytest.mark.slow
NO_DROPOUT = ["--hidden-dropout", 0, "--attention-dropout", 0]
# Many short samples: some of so few tokens that none of them is hidden.
SHORT = ["--short-seq-prob", 0.9]


@pytest.fixture
def train(command: Any, tmp_path: Path) -> Any:
    """The losses of a run, in this process or in several: training, validation and test."""

    def run(name: str, *words: object, processes: int = 1) -> list[float]:
        words = (*SIZES, *LENGTH, *words, "--save", tmp_path / name)
        if processes == 1:
            done = command(*words)
            assert done.returncode == 0, done.stderr
        else:
            assert run_in_kept_processes(main, processes, list(map(str, words))) == [0] * processes
        names = ("loss", "eval_loss", "test_loss")
        return [loss for kind in names for loss in get_losses(tmp_path / name, kind)]

    return run


@pytest.mark.parametrize(
    ("kind", "switches"),
    [
        ("bert", SHORT),
        ("roberta", SHORT),
        ("gpt2", ["--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask"]),
    ],
)
def test_micro_batches_and_processes_do_not_matter(
    kind: str, switches: list[Any], train: Any, gpt_corpus: list[object], bert_corpus: list[object]
) -> None:
    """BERT's loss has two terms, a mean over hidden tokens and one over rows: both stay exact."""
    corpus = gpt_corpus if kind == "gpt2" else bert_corpus
    common = ["--task", "pretraining", "--model-type", kind, *corpus, *NO_DROPOUT, *switches]
    whole = train("whole", *common, "--micro-batch-size", 8)
    assert len(whole) == 4 + 2 + 1
    # Alone, a short sample of BERT's may have no label at all.
    parts = train("parts", *common, "--micro-batch-size", 1 if kind == "bert" else 2)
    assert parts == pytest.approx(whole, rel=2e-6)
    common += ["--micro-batch-size", 2, "--zero-1-memory-optimization"]
    assert train("together", *common, processes=2) == pytest.approx(whole, rel=1e-5)


def test_the_script_gives_the_black_boxes_losses_bit_for_bit(
    train: Any, gpt_corpus: list[object], scripts: Path
) -> None:
    black = train("black", "--task", "pretraining", "--model-type", "gpt", *gpt_corpus)
    white = train("white", "--user-script", scripts / "gpt.py", *gpt_corpus)
    assert black == white
    assert len(black) == 7


def test_resumed_run_is_bit_equal(train: Any, gpt_corpus: list[object], tmp_path: Path) -> None:
    common = ["--task", "pretraining", "--model-type", "gpt", *gpt_corpus, "--train-iters", 6]
    common += ["--rampup-batch-size", 4, 4, 12]
    whole = train("whole", *common)
    train("parts", *common, "--exit-interval", 3)
    assert len(get_losses(tmp_path / "parts")) == 3
    resumed = train("parts", *common, "--load", tmp_path / "parts")
    assert resumed[:6] == whole[:6]


# --- the documents' own commands, with their switches, on two processes --------------------------
# As on any CPU, --onnx-runtime-training compiles nothing; in tests/examples it does.


@pytest.fixture(scope="module")
def small_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertConfig, BertForPreTraining

    folder = tmp_path_factory.mktemp("bert-model")
    config = BertConfig(
        vocab_size=75, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=24,
    )  # fmt: skip
    BertForPreTraining(config).save_pretrained(folder)
    return folder


def test_the_documents_bert_script(
    train: Any, bert_corpus: list[object], small_bert: Path, scripts: Path
) -> None:
    """`from megatron import mpu` included."""
    losses = train(
        "run", "--user-script", scripts / "bert.py", "--pretrained-model-name-or-path", small_bert,
        *bert_corpus, "--data-impl", "mmap", "--split", "980,20",
        "--lr-decay-style", "linear", "--weight-decay", "1e-2", "--clip-grad", "1.0",
        "--lr-warmup-fraction", ".01", "--zero-3-memory-optimization", "--onnx-runtime-training",
        "--mixed-precision", processes=2,
    )  # fmt: skip
    assert len(losses) == 4 + 2, "a split without test data"


def test_the_documents_black_box_command(
    train: Any, bert_corpus: list[object], small_bert: Path, scripts: Path, tmp_path: Path
) -> None:
    """What the shell script hands to the command is caught by a command of the same name."""
    catcher = tmp_path / "rapidformer"
    catcher.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    catcher.chmod(0o755)
    flags = dict(zip(bert_corpus[::2], bert_corpus[1::2], strict=True))
    caught = subprocess.run(
        ["bash", scripts / "black_box.sh"],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "MODEL": str(small_bert),
            "PREFIX": str(flags["--data-path"]),
            "VOCAB": str(flags["--vocab-file"]),
        },
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = caught.stdout.splitlines()
    assert "--fsdp-memory-optimization" in words
    losses = train("run", *words, *SIZES, *LENGTH, processes=2)
    assert len(losses) == 4 + 2 + 1


def test_the_documents_gpt_script_with_its_switches(
    train: Any, gpt_corpus: list[object], scripts: Path
) -> None:
    losses = train(
        "run", "--user-script", scripts / "gpt.py", *gpt_corpus, "--data-impl", "mmap",
        "--zero-2-memory-optimization", "--checkpoint-activations", "--mixed-precision",
        processes=2,
    )  # fmt: skip
    assert len(losses) == 4 + 2 + 1
