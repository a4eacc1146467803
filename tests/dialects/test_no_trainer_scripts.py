"""Scripts with a loop of their own on Accelerate's verbs, with only their import line changed."""

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
import yaml
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
)

from rapidformer import Accelerator
from rapidformer.errors import ConfigurationError
from tests.small import WORDS, make_model_folder, make_pair_data, make_tokenizer

SCRIPTS = Path(__file__).parent / "scripts"
GLUE = (
    "--model_name_or_path model --train_file data/train.jsonl --pad_to_max_length --seed 7 "
    "--validation_file data/validation.jsonl --per_device_train_batch_size 4 --learning_rate 0.01"
)
CLM = (
    "--train_file corpus.txt --validation_file corpus.txt --model_name_or_path gpt2 --seed 7 "
    "--tokenizer_name model --learning_rate 0.01 --max_train_steps 4"
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models without dropout and data, under the names that the scripts are given."""
    folder = tmp_path_factory.mktemp("no_trainer")
    make_model_folder(folder / "model", dropout=0.0)
    make_pair_data(folder / "data", train=24, validation=9)
    draw = np.random.default_rng(0)
    lines = [" ".join(draw.choice(WORDS, 6)) for _ in range(26)]
    (folder / "corpus.txt").write_text("\n".join(lines))
    rows = [json.dumps({"source": line, "target": line[:8]}) + "\n" for line in lines]
    (folder / "pairs.jsonl").write_text("".join(rows))
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(make_tokenizer()), n_embd=16, n_layer=1, n_head=2,
                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ).save_pretrained(folder / "gpt2")  # fmt: skip
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{w}", -2.0) for w in WORDS)]
    T5Tokenizer(vocab=pieces, extra_ids=0).save_pretrained(folder / "t5")
    T5ForConditionalGeneration(
        T5Config(vocab_size=len(pieces), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
                 decoder_start_token_id=0)
    ).save_pretrained(folder / "t5")  # fmt: skip
    return folder


def run(name: str, flags: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, *flags.split()])
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")


def read_results(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "all_results.json").read_text())
    return results


def test_text_classification_resumes_to_the_bit(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"{GLUE} --num_train_epochs 2"
    tracking = "--with_tracking --output_dir whole --checkpointing_steps 8"
    run("run_glue_no_trainer.py", f"{flags} {tracking}", workplace, monkeypatch)
    again = "--output_dir again --resume_from_checkpoint whole/step_8"
    run("run_glue_no_trainer.py", f"{flags} {again}", workplace, monkeypatch)
    whole, resumed = (load_file(workplace / n / "model.safetensors") for n in ("whole", "again"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    started = load_file(workplace / "model" / "model.safetensors")
    assert not all(torch.equal(started[name], whole[name]) for name in started if name in whole)
    AutoModelForSequenceClassification.from_pretrained(workplace / "whole")
    lines = (workplace / "whole" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [6, 12]
    last = json.loads(lines[-1])
    assert last["accuracy/accuracy"] == read_results(workplace / "whole")["eval_accuracy"]
    board = workplace / "whole" / "glue_no_trainer"
    assert yaml.safe_load((board / "hparams.yml").read_text())["lr_scheduler_type"] == "linear"
    assert list(board.glob("events.out.tfevents.*"))


def test_language_modelling_on_two_processes(
    python: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process with batches of 4 trains and evaluates as two with batches of 2."""
    common = f"{CLM} --gradient_accumulation_steps 2"
    sizes = "--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --output_dir one"
    run("run_clm_no_trainer.py", f"{common} {sizes}", workplace, monkeypatch)
    sizes = (
        "--per_device_train_batch_size 2 --per_device_eval_batch_size 2 --output_dir two "
        "--checkpointing_steps 2"
    )
    launch = ["launch", "--nproc-per-node", "2", "--device", "cpu"]
    script = str(SCRIPTS / "run_clm_no_trainer.py")
    done = subprocess.run(
        [python, "-m", "rapidformer.cli.main", *launch, script, *common.split(),
         *sizes.split()], cwd=workplace, text=True, capture_output=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "num_processes=2, process_index=1" in done.stderr, "main_process_only=False"
    assert done.stdout.count("epoch 0: perplexity") == 1
    one, two = read_results(workplace / "one"), read_results(workplace / "two")
    assert one["steps"] == two["steps"] == 4
    assert one["blocks"] == two["blocks"] and one["blocks"] % 4, "the last batch must be smaller"
    assert one["perplexity"] == pytest.approx(two["perplexity"], rel=1e-5)
    assert (workplace / "two" / "step_2").is_dir() and (workplace / "two" / "step_4").is_dir()
    weights = [load_file(workplace / n / "model.safetensors") for n in ("one", "two")]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-4, atol=1e-5)


def test_translation(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("run_translation_no_trainer.py", "", workplace, monkeypatch)
    assert 0 <= read_results(workplace / "translated")["eval_bleu"] <= 100
    T5ForConditionalGeneration.from_pretrained(workplace / "translated")


def test_other_trackers_are_refused() -> None:
    with pytest.raises(ConfigurationError) as error:
        Accelerator(cpu=True, log_with=["tensorboard", "other"])
    assert "log_with=other" in str(error.value) and "give project_dir" in str(error.value)
