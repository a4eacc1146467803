"""``rapidformer export``: what it writes, what it proves, and what it refuses."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

import rapidformer
from rapidformer import RapidformerEngine
from rapidformer.checkpoint.exporting import plain_process, proof
from rapidformer.checkpoint.saving import describe_model
from rapidformer.errors import CheckpointError, ConfigurationError, ModelError
from rapidformer.models import GPTForCausalLM
from tests.models.gpt.small import EXPERTS, MODERN, make_config, make_tokens
from tests.processes import PATIENCE, run_in_processes, wait_until
from tests.small import make_model_folder

from .test_forged import forge

IDS = torch.arange(8)[None]


def save_base(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    config = LlamaConfig(num_attention_heads=2, max_position_embeddings=32, **sizes)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * parameter.sign()  # tiny weights would show even tiny changes
    # In 16 bits, as most models that people start from.
    model.bfloat16().save_pretrained(folder)
    return folder


def train(model: nn.Module, folder: Path, *, steps: int = 2, **settings: Any) -> Path:
    """A run's folder with one checkpoint."""
    engine = RapidformerEngine(args={"lr": 0.05, "log_level": "error", **settings})
    composed: Any = engine.compose(model)[0]
    for _ in range(steps):
        engine.backward(composed(input_ids=IDS, labels=IDS).loss, weight=7)
        engine.step()
    engine.save_checkpoint(folder)
    engine.checkpoints.release_folder()
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_base(tmp_path / "base")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof without the seconds that a new process needs to import torch."""

    def compute(folder: Path, rows: plain_process.Rows) -> Any:
        return plain_process.compute_outputs(plain_process.load_model(folder), rows)

    monkeypatch.setattr(proof, "_compute_plainly", compute)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.usefixtures("in_process")
def test_checkpoint_is_exported_and_proven(
    base: Path, tmp_path: Path, command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """The LoRA example (tests/tasks/test_adapters.py) has the process of plain transformers."""
    model = load(base)
    run = train(model, tmp_path / "run")
    done = command("export", run, tmp_path / "out", "--max-shard-size", "2KB")
    assert done.returncode == 0, done.stderr
    assert "source    " in done.stderr and "iter_0000002 (step 2)" in done.stderr
    assert f"changes   21 of 21 tensors differ from the base model {base}" in done.stderr
    assert "fp32 as stored" in done.stderr
    assert "verified  by plain transformers: largest difference in the logits" in done.stderr
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors.index.json"} <= files
    assert max(len(load_file(f)) for f in (tmp_path / "out").glob("model-*.safetensors")) < 21
    assert torch.equal(load(tmp_path / "out")(IDS).logits, model.eval()(IDS).logits)


@pytest.mark.usefixtures("in_process")
def test_an_export_that_computes_other_logits_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(load(base), tmp_path / "run")

    def damage(tensors: dict[str, torch.Tensor], file: Path, metadata: Any) -> None:
        name = "model.layers.1.mlp.down_proj.weight"
        save_file({**tensors, name: tensors[name].flip(0)}, file, metadata)

    monkeypatch.setattr("rapidformer.checkpoint.exporting.files.save_file", damage)
    with pytest.raises(ModelError, match=r"other logits.*largest difference.*Nothing was exported"):
        rapidformer.export(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"]


def test_a_run_from_fresh_weights_has_nothing_to_compare_with(base: Path, tmp_path: Path) -> None:
    model = load(base)
    run = train(model, tmp_path / "run")
    model.save_pretrained(run / "last")
    (run / "arguments.yaml").write_text("from_scratch: true\n")
    assert rapidformer.export(run, tmp_path / "out", verify=False).changes is None
    # A script's run does not say so, but its base model may have no weights.
    (run / "arguments.yaml").unlink()
    (base / "model.safetensors").unlink()
    assert rapidformer.export(run, tmp_path / "out", verify=False).changes is None


@pytest.mark.usefixtures("in_process")
def test_an_export_that_is_the_base_model_is_refused(base: Path, tmp_path: Path) -> None:
    run = train(load(base), tmp_path / "run", lr=1e-7)
    exported = rapidformer.export(run, tmp_path / "fp32")
    assert exported.changes and exported.changes.changed > 0
    # In 16 bits, changes this small are lost.
    text = r"0 of 21 tensors differ from the base model .*: this export is the base model"
    with pytest.raises(ModelError, match=text):
        rapidformer.export(run, tmp_path / "out", dtype="bf16")
    assert not (tmp_path / "out").exists()
    found = rapidformer.export(run, tmp_path / "out", dtype="bf16", allow_unchanged=True)
    assert found.dtype == "bf16" and found.proof
    # The limit is what rounding does to this very model, with a margin.
    assert 0 < found.proof.relative < 0.1
    assert found.proof.limit == pytest.approx(1e-4 + 4 * found.proof.relative, rel=0.01)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_second_export_into_a_folder_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both used to write into one staging folder, and one of them published the other's weights."""
    one, out = train(load(base), tmp_path / "one"), tmp_path / "out"

    def meet(*_: Any) -> None:
        (answer,) = run_in_processes(_export, 1, str(base), str(out))
        assert f"{out} is in use by another run (process {os.getpid()} on " in answer

    monkeypatch.setattr("rapidformer.checkpoint.exporting.export.copy_texts", meet)
    rapidformer.export(one, out, verify=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "one", "out"]
    monkeypatch.undo()
    rapidformer.export(base, out, verify=False, allow_unchanged=True)


def test_an_export_that_was_killed_during_its_proof_leaves_nothing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(*_: Any) -> None:
        (tmp_path / "proving").touch()
        time.sleep(PATIENCE)

    monkeypatch.setattr("rapidformer.checkpoint.exporting.export.prove", hang)
    monkeypatch.setattr("rapidformer.checkpoint.lock._LOOK_SECONDS", 0.01)
    process = multiprocessing.get_context("fork").Process(
        target=rapidformer.export, args=(base, tmp_path / "out")
    )
    process.start()
    wait_until((tmp_path / "proving").exists)
    process.kill()
    process.join()
    assert not (tmp_path / "out").exists()
    rapidformer.export(base, tmp_path / "out", verify=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "proving"]


@pytest.mark.parametrize("name", ["../../x", "a/b", ".", "..", "a.b", "\0"])
def test_an_adapter_by_a_strange_name_is_refused(name: str, base: Path, tmp_path: Path) -> None:
    run = train(load(base), tmp_path / "run", lora_rank=2)
    (checkpoint,) = run.glob("iter_*")

    def rename(folder: Path) -> None:
        origin = json.loads((folder / "model" / "origin.json").read_text())
        (folder / "model" / "origin.json").write_text(json.dumps({**origin, "adapter": name}))

    forge(checkpoint, rename)
    with pytest.raises((ModelError, CheckpointError)):
        rapidformer.export(run, tmp_path / "out", verify=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"]


def _export(source: str, out: str) -> str:
    try:
        rapidformer.export(source, out, verify=False, allow_unchanged=True)
    except CheckpointError as error:
        return str(error)
    return "exported"


def test_an_export_that_was_replaced_under_its_name_is_no_success(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(target: Path, *, staging: Path, **_: Any) -> None:
        staging.rename(tmp_path / "elsewhere")
        target.mkdir()

    monkeypatch.setattr("rapidformer.checkpoint.lock.publish", publish)
    with pytest.raises(CheckpointError, match="out is not what was written: another program"):
        rapidformer.export(base, tmp_path / "out", verify=False)


def test_a_models_own_code_is_not_run(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    """`yes | rapidformer export MODEL OUT` answered transformers' question."""
    ran = tmp_path / "ran"
    (base / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    config = json.loads((base / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (base / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda _: "y")
    done = command("export", base, tmp_path / "out")
    assert done.returncode == 1 and not ran.exists()
    assert "comes with its own Python code, which export does not run" in done.stderr


def test_only_an_earlier_export_is_replaced(base: Path, tmp_path: Path) -> None:
    run, out = train(load(base), tmp_path / "run"), tmp_path / "out"
    out.mkdir()
    rapidformer.export(run, out, verify=False)
    rapidformer.export(run, out, verify=False, max_shard_size="2KB")
    assert not (out / "model.safetensors").exists()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"holds files that no export wrote \(notes.txt\)"):
        rapidformer.export(run, out, verify=False)
    with pytest.raises(ConfigurationError, match=r"holds files that no export wrote \(config.json"):
        rapidformer.export(run, base, verify=False)
    with pytest.raises(ConfigurationError, match="is a file"):
        rapidformer.export(run, out / "notes.txt", verify=False)
    with pytest.raises(ConfigurationError, match="max_shard_size"):
        rapidformer.export(run, tmp_path / "other", verify=False, max_shard_size="huge")
    with pytest.raises(ConfigurationError, match="no such folder"):
        rapidformer.export(tmp_path / "nowhere", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("has_file", [True, False], ids=["base in a file", "base in no file"])
def test_adapter_of_a_checkpoint_is_merged_or_exported_alone(
    has_file: bool, base: Path, tmp_path: Path
) -> None:
    model = load(base) if has_file else LlamaForCausalLM(LlamaConfig.from_pretrained(base))
    run = train(model, tmp_path / "run", lora_rank=2)
    expected = model.eval()(IDS).logits
    found = rapidformer.export(run, tmp_path / "merged")
    torch.testing.assert_close(load(tmp_path / "merged")(IDS).logits, expected)
    if not has_file:
        assert found.changes is None
        with pytest.raises(ModelError, match=r"weights under the adapter are in no file.*--merge"):
            rapidformer.export(run, tmp_path / "adapter", merge=False)
        return
    assert found.changes and (found.changes.changed, found.changes.total) == (4, 21)
    rapidformer.export(run, tmp_path / "adapter", merge=False)
    from peft import PeftModel

    again = PeftModel.from_pretrained(load(base), tmp_path / "adapter")
    torch.testing.assert_close(again(IDS).logits, expected)
    # An adapter's own folder is as good as a checkpoint, but not on another base model.
    rapidformer.export(tmp_path / "adapter", tmp_path / "again")
    torch.testing.assert_close(load(tmp_path / "again")(IDS).logits, expected)
    other = load(base)
    with torch.no_grad():
        other.lm_head.weight += 1
    other.save_pretrained(tmp_path / "changed")
    with pytest.raises(CheckpointError, match="not those that this adapter was trained on: lm_he"):
        rapidformer.export(run, tmp_path / "wrong", base=str(tmp_path / "changed"))


@pytest.mark.usefixtures("in_process")
def test_untrained_adapter_is_the_base_model(base: Path, tmp_path: Path) -> None:
    run = train(load(base), tmp_path / "run", steps=0, lora_rank=2)
    for merge in (True, False):
        with pytest.raises(ModelError, match="0 of 21 tensors differ"):
            rapidformer.export(run, tmp_path / "out", merge=merge)


@pytest.mark.usefixtures("in_process")
def test_learned_tokens_are_exported_alone(base: Path, tmp_path: Path) -> None:
    config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
    run = train(load(base), tmp_path / "run", peft_config=json.dumps(config))
    with pytest.raises(ModelError, match="PROMPT_TUNING prepends learned tokens"):
        rapidformer.export(run, tmp_path / "out")
    found = rapidformer.export(run, tmp_path / "out", merge=False)
    assert found.proof and found.proof.largest == 0


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "GPT2LMHeadModel"),
        ({"add_bias_linear": False, "tie_word_embeddings": False}, "GPT2LMHeadModel"),
        (MODERN, "LlamaForCausalLM"),
        (MODERN | {"add_bias_linear": True, "tie_word_embeddings": True}, "LlamaForCausalLM"),
        (MODERN | {"num_experts": 4}, "MixtralForCausalLM"),
    ],
    ids=["gpt2", "gpt2 without biases", "llama", "llama with biases", "mixtral"],
)
def test_gpt_model_becomes_a_model_of_transformers(
    options: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    ours = GPTForCausalLM(make_config(tokenizer_vocab_size=90, **options)).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # fresh biases would all be zero
    ours.save_pretrained(tmp_path / "model")
    found = rapidformer.export(tmp_path / "model", tmp_path / "out")
    assert found.proof and found.proof.relative < 1e-5
    theirs, tokens = load(tmp_path / "out"), make_tokens()
    assert type(theirs).__name__ == expected
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens).logits, atol=1e-4, rtol=1e-4)
    assert theirs.generation_config.suppress_tokens == list(range(90, 96))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"swiglu": True}, "learned positions with SwiGLU"),
        (EXPERTS, "learned positions with a mixture of experts"),
        (MODERN | EXPERTS, "layers with different numbers of experts"),
        (MODERN | {"rotary_percent": 0.5}, "rotary positions on 0.5 of each head"),
        (MODERN | {"position_embedding_type": "none"}, "no position embeddings"),
    ],
)
def test_gpt_model_without_an_equivalent_is_refused(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    GPTForCausalLM(make_config(**options)).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=f"no equivalent in transformers: {reason}"):
        rapidformer.export(tmp_path / "model", tmp_path / "out")


@pytest.mark.usefixtures("in_process")
def test_classifier_keeps_its_tokenizer(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "model")
    found = rapidformer.export(tmp_path / "model", tmp_path / "out", dtype="fp16")
    assert found.changes is None and found.proof and found.proof.relative < 0.02
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_tokenizer_is_saved_as_it_was_loaded(tmp_path: Path) -> None:
    """Not with the length to which its last call has cut: others would cut there, too."""
    make_model_folder(tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer(["a text", "another one"], truncation=True, max_length=8, padding=True)
    describe_model(model, tokenizer, tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    assert saved["truncation"] is saved["padding"] is None
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 8
    assert tokenizer.backend_tokenizer.padding is not None


def test_model_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            raise NotImplementedError

    run = train(Own(), tmp_path / "run", steps=0)
    with pytest.raises(CheckpointError, match=r"does not describe its model.*engine\.export"):
        rapidformer.export(run, tmp_path / "out")
