"""The same losses however a run is cut: micro-batches, processes, black or white box, resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.pretraining.corpus import LENGTH, SIZES, get_losses

NO_DROPOUT = ["--hidden-dropout", 0, "--attention-dropout", 0]


@pytest.fixture
def train(command: Any, rapidformer: Any, tmp_path: Path) -> Any:
    """The losses of a run: in this process, or in several."""

    def run(name: str, *words: object, processes: int = 1) -> list[float]:
        words = (*SIZES, *LENGTH, *words, "--save", tmp_path / name)
        if processes == 1:
            done = command(*words)
        else:
            done = rapidformer(*words, "--nproc-per-node", processes)
        assert done.returncode == 0, done.stderr
        return get_losses(tmp_path / name) + get_losses(tmp_path / name, "eval_loss")

    return run


@pytest.mark.parametrize(
    ("kind", "switches"),
    [
        ("bert", []),
        ("roberta", []),
        ("gpt2", ["--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask"]),
    ],
)
def test_micro_batches_do_not_matter(
    kind: str, switches: list[str], train: Any, gpt_corpus: list[object], bert_corpus: list[object]
) -> None:
    """BERT's loss has two terms, a mean over hidden tokens and one over rows: both stay exact."""
    corpus = gpt_corpus if kind == "gpt2" else bert_corpus
    common = ["--task", "pretraining", "--model-type", kind, *corpus, *NO_DROPOUT, *switches]
    whole = train("whole", *common, "--micro-batch-size", 8)
    for micro in (1, 2):
        parts = train(f"micro-{micro}", *common, "--micro-batch-size", micro)
        assert parts[:4] == pytest.approx(whole[:4], rel=2e-6)


def test_processes_do_not_matter(train: Any, bert_corpus: list[object]) -> None:
    common = ["--task", "pretraining", "--model-type", "bert", *bert_corpus, *NO_DROPOUT]
    alone = train("alone", *common)
    together = train("together", *common, "--zero-1-memory-optimization", processes=2)
    assert together == pytest.approx(alone, rel=1e-5)


def test_the_script_gives_the_black_boxes_losses_bit_for_bit(
    train: Any, gpt_corpus: list[object], scripts: Path
) -> None:
    black = train("black", "--task", "pretraining", "--model-type", "gpt", *gpt_corpus)
    white = train("white", "--user-script", scripts / "gpt.py", *gpt_corpus)
    assert black == white
    assert len(black) == 6


def test_resumed_run_is_bit_equal(train: Any, gpt_corpus: list[object], tmp_path: Path) -> None:
    common = ["--task", "pretraining", "--model-type", "gpt", *gpt_corpus, "--train-iters", 6]
    common += ["--rampup-batch-size", 4, 4, 12]
    whole = train("whole", *common)
    train("parts", *common, "--exit-interval", 3)
    assert len(get_losses(tmp_path / "parts")) == 3
    resumed = train("parts", *common, "--load", tmp_path / "parts")
    assert resumed[:6] == whole[:6]


def _run_script(name: str, variables: dict[str, str], *words: object) -> str:
    done = subprocess.run(
        ["bash", name, *map(str, words)],
        env={
            **os.environ,
            **variables,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


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
    rapidformer: Any, bert_corpus: list[object], small_bert: Path, scripts: Path, tmp_path: Path
) -> None:
    """With the documents' switches, on two processes; `from megatron import mpu` included."""
    done = rapidformer(
        "--user-script", scripts / "bert.py", "--pretrained-model-name-or-path", small_bert,
        *SIZES, *LENGTH, *bert_corpus, "--data-impl", "mmap", "--split", "980,20",
        "--lr-decay-style", "linear", "--weight-decay", "1e-2", "--clip-grad", "1.0",
        "--lr-warmup-fraction", ".01", "--zero-3-memory-optimization", "--onnx-runtime-training",
        "--compile-backend", "aot_eager", "--mixed-precision", "--nproc-per-node", 2,
        "--save", tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ZeRO-3 over 2 processes" in done.stderr
    assert len(get_losses(tmp_path / "run")) == 4


def test_the_documents_black_box_command(
    bert_corpus: list[object], small_bert: Path, scripts: Path, tmp_path: Path
) -> None:
    flags = dict(zip(bert_corpus[::2], bert_corpus[1::2], strict=True))
    variables = {
        "MODEL": str(small_bert),
        "PREFIX": str(flags["--data-path"]),
        "VOCAB": str(flags["--vocab-file"]),
    }
    shown = _run_script(
        str(scripts / "black_box.sh"), variables, *SIZES, *LENGTH, "--compile-backend", "aot_eager",
        "--nproc-per-node", 2, "--save", tmp_path / "run",
    )  # fmt: skip
    assert "ZeRO-3 over 2 processes" in shown
    assert len(get_losses(tmp_path / "run")) == 4


def test_the_documents_gpt_script_with_its_switches(
    rapidformer: Any, gpt_corpus: list[object], scripts: Path, tmp_path: Path
) -> None:
    done = rapidformer(
        "--user-script", scripts / "gpt.py", *SIZES, *LENGTH, *gpt_corpus, "--data-impl", "mmap",
        "--zero-2-memory-optimization", "--checkpoint-activations", "--mixed-precision",
        "--nproc-per-node", 2, "--save", tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ZeRO-2 over 2 processes" in done.stderr
    assert len(get_losses(tmp_path / "run")) == 4
