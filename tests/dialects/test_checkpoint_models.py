"""Each checkpoint of a Trainer is a folder that ``from_pretrained`` reads, and can be resumed."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rapidformer import RapidformerEngine
from rapidformer.checkpoint.index import find_index_problems, read_index
from rapidformer.checkpoint.loading import check_checkpoint
from rapidformer.checkpoint.saving import Save
from rapidformer.errors import CheckpointError
from tests.dialects.small import make_classifier
from tests.dialects.test_trainer import make_trainer, read_losses
from tests.processes import run_in_kept_processes
from tests.small import make_model_folder


class Load(transformers.TrainerCallback):
    """Loads each checkpoint as soon as it is there."""

    def __init__(self, load: Any) -> None:
        self.load, self.seen = load, 0

    def on_save(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        loaded = self.load(f"{args.output_dir}/checkpoint-{state.global_step}").state_dict()
        trained = details["model"].state_dict()
        assert loaded.keys() == trained.keys()
        torch.testing.assert_close(loaded, trained, atol=0, rtol=0)
        self.seen += 1


def test_the_tokenizer_of_the_collate_function_is_saved(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_model_folder(tmp_path / "model"))
    tokenizer.add_tokens(["<own>"])
    pad = transformers.DataCollatorWithPadding(tokenizer)
    trainer = make_trainer(tmp_path / "out", data_collator=pad, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "out" / "checkpoint-1", tmp_path / "saved"):
        assert len(AutoTokenizer.from_pretrained(folder)) == len(tokenizer)


def test_a_run_resumes_with_a_load_state_dict_of_the_models_own(tmp_path: Path) -> None:
    class Renames(type(make_classifier())):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
            named = {name.removeprefix("module."): w for name, w in state_dict.items()}
            return super().load_state_dict(named, strict=strict)

    def make_model() -> Any:
        model = make_classifier()
        model.__class__ = Renames
        return model

    settings: dict[str, Any] = {"learning_rate": 1e-2, "save_steps": 2, "max_steps": 4}
    make_trainer(tmp_path / "out", model=make_model(), **settings).train()
    shutil.copytree(tmp_path / "out", tmp_path / "again", symlinks=True)
    again = make_trainer(tmp_path / "again", model=make_model(), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "again" / "checkpoint-2"))
    assert read_losses(tmp_path / "again") == read_losses(tmp_path / "out")


def test_every_checkpoint_is_a_model_and_the_run_resumes_from_it(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_model_folder(tmp_path / "model"))
    load = Load(AutoModelForSequenceClassification.from_pretrained)
    settings: dict[str, Any] = {"learning_rate": 1e-2, "save_steps": 2, "max_steps": 6}
    make_trainer(tmp_path / "out", processing_class=tokenizer, callbacks=[load], **settings).train()
    assert load.seen == 3
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert len(AutoTokenizer.from_pretrained(checkpoint)) == len(tokenizer)
    # The weights are there once.
    for name, entry in read_index(checkpoint / "state").items():
        is_weight = name.startswith("model.")
        assert {part.file for part in entry.parts} == {
            "../model.safetensors" if is_weight else "__0_0.distcp"
        }
    shutil.copytree(tmp_path / "out", tmp_path / "again", symlinks=True)
    again = make_trainer(tmp_path / "again", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "again" / "checkpoint-2"))
    assert read_losses(tmp_path / "again") == read_losses(tmp_path / "out")


@pytest.mark.parametrize("hears", [False, True], ids=["alone", "a callback looks"])
def test_a_checkpoint_written_behind_training_is_that_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hears: bool
) -> None:
    monkeypatch.setattr("rapidformer.engine.checkpoints.SMALLEST_BYTES", 0)
    write = Save.write

    def write_late(save: Save, *values: Any) -> None:
        time.sleep(0.3)
        write(save, *values)

    monkeypatch.setattr(Save, "write", write_late)
    load = Load(AutoModelForSequenceClassification.from_pretrained)
    callbacks = [load] if hears else []
    make_trainer(tmp_path, save_steps=2, max_steps=5, callbacks=callbacks).train()
    assert load.seen == 3 * hears
    for step in (2, 4, 5):
        folder = tmp_path / f"checkpoint-{step}"
        assert folder.resolve().name == f"iter_{step:07}"
        state = json.loads((folder / "trainer_state.json").read_text())
        assert state["global_step"] == step
        assert {line["step"] for line in state["log_history"]} == set(range(1, step + 1))


def test_weights_that_were_changed_are_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=1).train()
    checkpoint = tmp_path / "iter_0000001"
    check_checkpoint(checkpoint)
    content = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not what was written"):
        check_checkpoint(checkpoint)
    # A file of the same size, whose header says something else than the index.
    other = content.replace(b'"F32"', b'"I32"', 1)
    (checkpoint / "model.safetensors").write_bytes(other)
    state = checkpoint / "state"
    [problem] = find_index_problems(read_index(state), state)
    assert "is not what the header of model.safetensors says of these bytes" in problem


def test_a_callback_that_overwrites_the_weights_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Save(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "model.safetensors"
            save_file(load_file(path), path)

    make_trainer(tmp_path, max_steps=1, callbacks=[Save()], log_level="warning").train()
    assert "written over the weights in iter_0000001" in caplog.text


def test_an_adapter_is_read_by_peft(tmp_path: Path) -> None:
    make_classifier().save_pretrained(tmp_path / "base")

    def build() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")

    config = LoraConfig(target_modules=["query"], modules_to_save=["classifier"], r=2)
    adapted = get_peft_model(build(), config)
    load = Load(lambda folder: PeftModel.from_pretrained(build(), folder))
    trainer = make_trainer(
        tmp_path / "out", model=adapted, max_steps=2, save_steps=1, callbacks=[load]
    )
    trainer.train()
    assert load.seen == 2
    assert not (tmp_path / "out" / "checkpoint-1" / "model.safetensors").exists()


def test_tied_weights_and_fused_experts_are_read(tmp_path: Path) -> None:
    mixtral: dict[str, Any] = {
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 8,
    }  # fmt: skip
    sizes: dict[str, Any] = {"vocab_size": 40, "num_layers": 1, "num_heads": 2}
    made = [
        transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2)),
        transformers.T5ForConditionalGeneration(
            transformers.T5Config(**sizes, d_model=16, d_ff=16, d_kv=8)
        ),
        transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**mixtral, num_key_value_heads=1, num_local_experts=2)
        ),
    ]
    for model in made:
        kind: Any = type(model)
        engine = RapidformerEngine(args={"device": "cpu", "log_level": "error"})
        engine.checkpoints.holds_model = True
        engine.compose(model, torch.optim.SGD(model.parameters(), lr=0.1))
        saved = engine.save_checkpoint(tmp_path / kind.__name__)
        engine.close()
        model.config.save_pretrained(saved)
        loaded, report = kind.from_pretrained(saved, output_loading_info=True)
        assert not any(report[name] for name in ("missing_keys", "unexpected_keys"))
        torch.testing.assert_close(loaded.state_dict(), model.state_dict(), atol=0, rtol=0)


@pytest.mark.slow
def test_split_weights_are_joined(tmp_path: Path) -> None:
    """Fused and tied ones of GPT-2, split over layers and within them."""
    run_in_kept_processes(_save_split, 2, str(tmp_path))
    for layout in ("tensor", "pipeline"):
        [saved] = (tmp_path / layout).glob("iter_*")
        check_checkpoint(saved)
        loaded: Any = transformers.GPT2LMHeadModel.from_pretrained(saved)
        torch.testing.assert_close(loaded.state_dict(), _make_gpt().state_dict(), atol=0, rtol=0)


def _make_gpt() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40)
    return transformers.GPT2LMHeadModel(config)


def _save_split(folder: str) -> None:
    for layout in ("tensor", "pipeline"):
        settings = {f"{layout}_model_parallel_size": 2, "device": "cpu", "log_level": "error"}
        engine, model = RapidformerEngine(args=settings), _make_gpt()
        engine.checkpoints.holds_model = True
        engine.compose(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        saved = engine.save_checkpoint(f"{folder}/{layout}")
        if engine.is_main:
            model.config.save_pretrained(saved)
        engine.load_checkpoint(saved)
        engine.close()
