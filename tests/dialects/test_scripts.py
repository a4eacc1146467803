"""Scripts as users have them, with only their import lines changed (and paths), run to the end."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
    ViTConfig,
    ViTModel,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from tests.small import WORDS, make_pair_data, make_tokenizer

SCRIPTS = Path(__file__).parent / "scripts"
SHORT = (
    "--output_dir out --max_steps 3 --use_cpu --disable_tqdm true --log_level error "
    "--per_device_train_batch_size 4 --save_strategy no --eval_strategy steps --eval_steps 2"
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data under the names that the scripts look for."""
    folder = tmp_path_factory.mktemp("scripts")
    _write_models(folder)
    make_pair_data(folder / "data", train=24, validation=9)
    draw = np.random.default_rng(0)
    lines = [" ".join(draw.choice(WORDS, 6)) for _ in range(24)]
    (folder / "corpus.txt").write_text("\n".join(lines))
    _write(folder / "ner.jsonl", [
        {"tokens": line.split(), "ner_tags": ["B-PER", "I-PER", "O", "O", "O", "O"]}
        for line in lines
    ])  # fmt: skip
    _write(folder / "qa.jsonl", [
        {"id": str(i), "question": "w1 w2", "context": line, "start": 4,
         "answers": {"text": [line.split()[0]], "answer_start": [0]}}
        for i, line in enumerate(lines)
    ])  # fmt: skip
    _write(folder / "pairs.jsonl", [{"source": line, "target": line[:8]} for line in lines])
    _write(folder / "swag.jsonl", [
        {"sent1": line, "label": i % 4, **{f"ending{k}": f"w{k} w{i}" for k in range(4)}}
        for i, line in enumerate(lines)
    ])  # fmt: skip
    for number in range(8):
        target = folder / "images" / f"class{number % 2}" / f"{number}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (8, 8, 3)).astype("uint8")).save(target)
    return folder


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_models(folder: Path) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                             "intermediate_size": 32}  # fmt: skip
    tokenizer.save_pretrained(folder / "model")
    BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes)
              ).save_pretrained(folder / "model")  # fmt: skip
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2)
                    ).save_pretrained(folder / "gpt2")  # fmt: skip
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{w}", -2.0) for w in WORDS)]
    T5Tokenizer(vocab=pieces, extra_ids=0).save_pretrained(folder / "t5")
    T5ForConditionalGeneration(
        T5Config(vocab_size=len(pieces), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
                 decoder_start_token_id=0)
    ).save_pretrained(folder / "t5")  # fmt: skip
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder / "vit")
    ViTModel(ViTConfig(image_size=8, patch_size=4, **sizes)).save_pretrained(folder / "vit")


def run(name: str, flags: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The script as ``python script.py flags`` would run it; returns its variables."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, *flags.split()])
    return runpy.run_path(str(SCRIPTS / name), run_name="__main__")


def read_results(folder: Path, split: str = "eval") -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "out" / f"{split}_results.json").read_text())
    return results


def test_the_documents_trainer_script(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run("hugging_face_trainer.py", "", workplace, monkeypatch)
    printed = capsys.readouterr().out
    assert printed.startswith("TrainingArguments(\n    output_dir='test-trainer',\n")
    assert "(9, 2) (9,)" in printed
    assert names["trainer"].state.global_step == 9
    assert (workplace / "test-trainer" / "last" / "tokenizer.json").is_file()


def test_the_documents_trainer_script_on_two_processes(python: Path, workplace: Path) -> None:
    words = ["launch", "--nproc-per-node", "2", "--device", "cpu", "hugging_face_trainer.py"]
    (workplace / words[-1]).write_text((SCRIPTS / words[-1]).read_text())
    done = subprocess.run(
        [python, "-m", "rapidformer.cli.main", *words], cwd=workplace, text=True,
        capture_output=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(9, 2)") == done.stdout.count("(9,)") == 2  # lines may interleave
    assert "batch     16 = 8 micro x 2 data parallel x 1 accumulation" in done.stderr


def test_the_documents_pytorch_script(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("pytorch_style.py", "", workplace, monkeypatch)
    assert "'accuracy'" in capsys.readouterr().out


def test_text_classification(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--model_name_or_path model --train_file data/train.jsonl --do_train --do_eval "
        "--do_predict --validation_file data/validation.jsonl"
    )
    run("run_glue.py", f"{flags} {SHORT}", workplace, monkeypatch)
    out = workplace / "out"
    assert {"eval_accuracy", "eval_loss", "eval_samples"} <= read_results(workplace).keys()
    assert read_results(workplace, "train")["train_samples"] == 24
    assert len((out / "predict_results.txt").read_text().split()) == 9
    assert (out / "model.safetensors").is_file() and (out / "README.md").is_file()
    assert "***** eval metrics *****" in capsys.readouterr().out


def test_text_classification_resumes_by_itself(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (
        "--model_name_or_path model --train_file data/train.jsonl --do_train --output_dir again "
        "--validation_file data/validation.jsonl --use_cpu --log_level error --save_steps 2"
    )
    run("run_glue.py", f"{flags} --max_steps 2", workplace, monkeypatch)
    run("run_glue.py", f"{flags} --max_steps 4", workplace, monkeypatch)
    assert sorted(p.name for p in (workplace / "again").glob("checkpoint-*")) == [
        "checkpoint-2", "checkpoint-4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "flags", "metrics"),
    [
        ("run_ner.py", "", {"eval_precision", "eval_f1", "eval_accuracy"}),
        ("run_qa.py", "", {"eval_exact_match", "eval_f1"}),
        ("run_swag.py", "", {"eval_accuracy"}),
        ("run_image_classification.py", "--remove_unused_columns false", {"eval_accuracy"}),
    ],
)
def test_other_tasks(
    name: str, flags: str, metrics: set[str], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(name, f"{SHORT} {flags}", workplace, monkeypatch)
    assert {"eval_loss", "eval_runtime", *metrics} <= read_results(workplace).keys()


@pytest.mark.parametrize(("task", "metric"), [("summarization", "rougeL"), ("translation", "bleu")])
def test_generation(
    task: str, metric: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("run_seq2seq.py", f"{task} {SHORT} --predict_with_generate", workplace, monkeypatch)
    assert {f"eval_{metric}", "eval_gen_len", "eval_loss"} <= read_results(workplace).keys()
    assert f"predict_{metric}" in read_results(workplace, "predict")


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_language_models(kind: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("run_lm.py", f"{kind} {SHORT}", workplace, monkeypatch)
    results = read_results(workplace)
    assert results["perplexity"] > 1 and 0 <= results["eval_accuracy"] <= 1
