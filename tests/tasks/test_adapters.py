"""LoRA by flags, in one process: trained, saved, resumed, evaluated, asked and merged."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rapidformer.checkpoint.exporting import plain_process, proof

from .conftest import write_jsonl

Command = Callable[..., subprocess.CompletedProcess[str]]
EXAMPLES = Path(__file__).parents[2] / "examples"
TENSOR = "--tensor-model-parallel-size"
QUANTIZED = f"--quantize-base 4bit cannot be combined with {TENSOR}"
LORA = ("--lora-rank", 4, "--lora-target-modules", "c_attn", "c_proj", "--lora-dropout", 0.1)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pairs = [("who runs ?", "john runs"), ("is the cat red ?", "no"), ("hello", "hello world !")]
    rows = [{"prompt": p, "response": r} for p, r in pairs * 4]
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", rows)


def describe_training(model: Path, data: Path, run: Path, steps: int) -> tuple[Any, ...]:
    return (
        "--task", "causal_lm", "--pretrained-model-name-or-path", model, "--data-path", data,
        "--validation-split", 0.25, "--train-iters", steps, "--micro-batch-size", 3, "--lr", 0.02,
        "--lr-decay-style", "constant", "--save-interval", 2, "--save", run,
    )  # fmt: skip


def read_evaluations(run: Path) -> list[dict[str, Any]]:
    """Other lines may follow: a slow save is logged too."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "eval_loss" in line]


def run_all(command: Command, *words: Any) -> subprocess.CompletedProcess[str]:
    done = command(*words)
    assert done.returncode == 0, done.stderr
    return done


def test_lora_by_flags_from_training_to_a_merged_model(
    command: Command, gpt_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = run_all(command, *describe_training(gpt_folder, prompts, run, 4), *LORA)
    # Plain peft loads it, and the frozen weights are those of the base, bit by bit.
    loaded = AutoPeftModelForCausalLM.from_pretrained(run / "last")
    assert loaded.peft_config["default"].lora_alpha == 8
    assert loaded.peft_config["default"].base_model_name_or_path == str(gpt_folder)
    weights = load_file(run / "last" / "adapter_model.safetensors")
    assert any("lora_B" in name and tensor.any() for name, tensor in weights.items())
    trained = sum(tensor.numel() for tensor in weights.values())
    total = sum(parameter.numel() for parameter in loaded.parameters())
    said = f"LORA, rank 4 on c_attn, c_proj; trainable {trained:,} of {total:,} parameters ("
    assert said + f"{100 * trained / total:.2f} %)" in done.stderr

    # A checkpoint holds adapters, their optimizer state, and checksums of the base.
    from rapidformer.checkpoint.tensors import StoredTensors

    newest = run / "iter_0000004"
    names = StoredTensors(newest / "state").kinds
    assert all("lora" in name for name in names if name.startswith(("model.", "optimizer.")))
    assert len(json.loads((newest / "run.json").read_text())["base"]["checksums"]) > 20

    # The same numbers come from the run's folder, the adapter's and the merged model.
    found = json.loads(run_all(command, "evaluate", "--load", run).stdout)
    best = min(line["eval_loss"] for line in read_evaluations(run))
    assert found["loss"] == pytest.approx(best, rel=1e-5)
    merged = tmp_path / "merged"
    done = run_all(command, "export", run / "last", merged, "--no-verify")
    assert "(base model and adapter merged)" in done.stderr
    ids = torch.arange(2, 12)[None]
    plain = AutoModelForCausalLM.from_pretrained(merged)
    assert not (merged / "adapter_config.json").exists()
    torch.testing.assert_close(plain(ids).logits, loaded(ids).logits, rtol=1e-5, atol=1e-6)
    base = AutoModelForCausalLM.from_pretrained(gpt_folder)
    assert (base(ids).logits - plain(ids).logits).abs().max() > 1e-3, "training changed nothing"
    question = ("--task", "causal_lm", "--input", "who runs ?", "--max-new-tokens", 4)
    answers = [
        run_all(command, "predict", "--load", folder, *question).stdout
        for folder in (run / "last", merged)
    ]
    assert answers[0] == answers[1]


def test_a_resumed_adapter_is_the_one_of_an_unbroken_run(
    command: Command, gpt_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_all(command, *describe_training(gpt_folder, prompts, whole, 4), *LORA)
    first = describe_training(gpt_folder, prompts, broken, 4)
    run_all(command, *first, *LORA, "--exit-interval", 2)
    run_all(command, *first, *LORA, "--load", broken)
    for name, tensor in load_file(whole / "last" / "adapter_model.safetensors").items():
        other = load_file(broken / "last" / "adapter_model.safetensors")[name]
        assert torch.equal(tensor, other), name

    # On other frozen weights it is refused.
    other = AutoModelForCausalLM.from_pretrained(gpt_folder)
    with torch.no_grad():
        other.transformer.wte.weight[3, 3] += 1
    other.save_pretrained(tmp_path / "other")
    for file in gpt_folder.glob("tokenizer*"):
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    changed = describe_training(tmp_path / "other", prompts, tmp_path / "third", 4)
    done = command(*changed, *LORA, "--load", broken)
    assert done.returncode == 1
    assert "are not those that this adapter was trained on: transformer.wte.weight" in done.stderr


def test_a_new_head_is_saved_with_the_adapter(
    command: Command, bert_folder: Path, tmp_path: Path
) -> None:
    rows = [{"text": f"the cat {w}", "label": w} for w in ("runs", "eats", "sleeps")] * 6
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    run = tmp_path / "run"
    run_all(
        command, "--task", "sequence_classification", "--pretrained-model-name-or-path",
        bert_folder, "--data-path", data, "--validation-split", 0.2, "--train-iters", 3, "--lr",
        0.01, "--save", run, "--lora-rank", 2, "--use-dora",
    )  # fmt: skip
    names = load_file(run / "last" / "adapter_model.safetensors")
    assert "base_model.model.classifier.weight" in names
    assert "base_model.model.bert.pooler.dense.weight" in names, "the base has no pooler either"
    trained = read_evaluations(run)[-1]
    found = json.loads(run_all(command, "evaluate", "--load", run / "last").stdout)
    assert found["loss"] == pytest.approx(trained["eval_loss"], rel=1e-5)
    base = AutoModelForSequenceClassification.from_pretrained(bert_folder, num_labels=3)
    assert isinstance(PeftModel.from_pretrained(base, run / "last"), PeftModel)


def test_wrong_adapters_are_refused_in_a_sentence(
    command: Command, gpt_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.json").write_text('{"r": 3}')
    (tmp_path / "unknown.json").write_text('{"peft_type": "LOHAA"}')
    cases = (
        (("--lora-rank", 0), "--lora-rank must be at least 1"),
        (("--lora-rank", 2, "--lora-target-modules", "q_proj"), "layers are wte, wpe, c_attn"),
        (("--peft-config", "nowhere.json"), "--peft-config nowhere.json is not a file"),
        (("--peft-config", tmp_path / "broken.json"), "lacks peft_type"),
        (("--peft-config", tmp_path / "unknown.json"), "'LOHAA'. Did you mean LOHA? It has ADA"),
        (("--quantize-base", "4bit"), "needs --lora-rank or --peft-config"),
        (("--lora-rank", 2, "--quantize-base", "4bit", TENSOR, 2), QUANTIZED),
    )  # fmt: skip
    for number, (flags, text) in enumerate(cases):
        words = describe_training(gpt_folder, prompts, tmp_path / f"run{number}", 1)
        done = command(*words, *flags)
        assert done.returncode in (1, 2) and text in done.stderr, (flags, done.stderr)
    if find_spec("bitsandbytes") is None:
        assert "needs the package bitsandbytes: pip install bitsandbytes" in done.stderr


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "PREFIX_TUNING"])
def test_learned_tokens_by_a_file_are_trained_evaluated_and_asked(
    kind: str, command: Command, gpt_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"peft_type": kind, "num_virtual_tokens": 3}))
    words = describe_training(gpt_folder, prompts, tmp_path / "run", 2)
    run_all(command, *words, "--peft-config", tmp_path / "config.json")
    trained = read_evaluations(tmp_path / "run")[-1]
    found = json.loads(run_all(command, "evaluate", "--load", tmp_path / "run" / "last").stdout)
    assert found["loss"] == pytest.approx(trained["eval_loss"], rel=1e-5)
    question = ("--task", "causal_lm", "--input", "who runs ?", "--max-new-tokens", 3)
    assert "who runs" in run_all(command, "predict", "--load", tmp_path / "run", *question).stdout
    done = command("export", "--load", tmp_path / "run", "--save", tmp_path / "merged")
    assert done.returncode == 1 and f"{kind} prepends learned tokens" in done.stderr


@pytest.mark.usefixtures("as_the_processor_can")
def test_the_example_goes_from_chat_data_to_answers(
    python: Path, gpt_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        ["bash", str(EXAMPLES / "lora.sh"), "--epochs", "1", "--seq-length", "48"],
        env={
            **os.environ, "MODEL": str(gpt_folder), "DATA": str(prompts), "QUESTION": "who runs ?",
            "RUN": str(tmp_path / "run"), "PATH": f"{python.parent}:{os.environ['PATH']}",
        },
        capture_output=True, text=True, cwd=tmp_path, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "trainable" in done.stderr and "verified  by plain transformers" in done.stderr
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["loss"] > 0
    assert "who runs" in done.stdout.splitlines()[-1]


def test_the_notebook_does_the_same_by_calls(
    gpt_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    # The proof in this process: a new one takes seconds to import torch.
    monkeypatch.setattr(
        proof,
        "_compute_plainly",
        lambda folder, rows: plain_process.compute_outputs(plain_process.load_model(folder), rows),
    )
    monkeypatch.setattr("sys.argv", ["lora_notebook.py"])
    monkeypatch.setenv("MODEL", str(gpt_folder))
    for name in ("TRAIN", "EVAL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match=r"^TRAIN, EVAL not set"):
        runpy.run_path(str(EXAMPLES / "lora_notebook.py"), run_name="__main__")
    for name in ("TRAIN", "EVAL"):
        monkeypatch.setenv(name, str(prompts))
    runpy.run_path(str(EXAMPLES / "lora_notebook.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "perplexity" in printed and "who runs" in printed
    assert (tmp_path / "run" / "last" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
