"""MindFormers' scripts, its words and its launchers."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from rapidformer.dialects.mindformers import Trainer, TrainingArguments
from rapidformer.dialects.mindformers.context import adopt_rank_variables
from rapidformer.errors import CheckpointError, ConfigurationError
from tests.dialects.small import collate, make_classifier, make_rows
from tests.processes import PATIENCE, find_free_port, run_in_processes

SCRIPTS = Path(__file__).parent / "scripts"
WORDS = ["hello", "!", *(f"w{i}" for i in range(30))]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the scripts find in their folder."""
    monkeypatch.chdir(fill(tmp_path))
    return tmp_path


def fill(tmp_path: Path) -> Path:
    """A tiny GPT-2, its tokenizer, and data in ./train and ./eval."""
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(tmp_path / "gpt2")
    config = GPT2Config(
        vocab_size=len(words), n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    for split, count in (("train", 12), ("eval", 4)):
        (tmp_path / split).mkdir()
        rows = ({"text": " ".join(WORDS[(i + k) % 30] for k in range(20))} for i in range(count))
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / split / "text.jsonl").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        ("train", ["--train_dataset", "./train"]),
        ("eval", ["--eval_dataset", "./eval"]),
        ("finetune", ["--train_dataset", "./train"]),
        ("predict", ["--predict_data", "hello!"]),
    ],
)
def test_standalone_task(
    place: Path,
    mode: str,
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--task", "text_generation", "--model_type", "gpt2", *flags, "--run_mode", mode]
    monkeypatch.setattr(sys, "argv", ["standalone_task.py", *words])
    runpy.run_path(str(SCRIPTS / "standalone_task.py"), run_name="__main__")
    if mode == "predict":
        (answer,) = eval(capsys.readouterr().out.strip().splitlines()[-1])
        assert answer["text_generation_text"][0].startswith("hello!")
    elif mode != "eval":
        assert (place / "output" / "last" / "model.safetensors").is_file()
        lines = (place / "output" / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines if '"loss"' in line]
        assert steps[0] == 2, "the host looks every sink_size updates"


DISTRIBUTED = [
    "--task", "text_generation", "--model_type", "gpt2", "--train_dataset", "./train",
    "--run_mode", "train", "--data_parallel", "1", "--model_parallel", "2",
    "--pipeline_parallel", "2", "--micro_size", "2",
]  # fmt: skip


def test_distribute_task_by_rank_table(python: Path, place: Path) -> None:
    """Model 2, started as MindFormers' own launch script does; the next but one has stages, too."""
    devices = [{"device_id": str(i), "rank_id": str(i)} for i in range(2)]
    table = {"server_list": [{"server_id": "127.0.0.1", "device": devices}], "status": "completed"}
    (place / "hccl.json").write_text(json.dumps(table))
    common = {
        **os.environ, "RANK_SIZE": "2", "RANK_TABLE_FILE": str(place / "hccl.json"),
        "MASTER_PORT": str(find_free_port()), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    workers = [
        subprocess.Popen(
            [python, str(SCRIPTS / "distribute_task.py"), *DISTRIBUTED, "--pipeline_parallel", "1"],
            env={**common, "DEVICE_ID": str(rank), "RANK_ID": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [worker.communicate(timeout=PATIENCE)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 2, errors[0][-3000:]
    check_trained(place, model_parallel=2)


def test_distribute_task_by_our_command(
    python: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(python))
    from rapidformer.cli.main import main

    script = str(SCRIPTS / "distribute_task.py")
    # The test above splits the layers.
    words = [*DISTRIBUTED, "--model_parallel", "1"]
    assert main(["launch", "--nproc-per-node", "2", "--device", "cpu", script, *words]) == 0
    check_trained(place, stages=2)


def read_losses(place: Path) -> list[float]:
    lines = (place / "output" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if '"loss"' in line]


def run_script(words: list[str]) -> None:
    """The distributed script, in one of the processes of a run that has been started."""
    torch.set_num_threads(1)
    sys.argv = ["distribute_task.py", *words]
    runpy.run_path(str(SCRIPTS / "distribute_task.py"), run_name="__main__")


def test_lora_on_model_2_x_pipeline_2_has_the_losses_of_one_process(place: Path) -> None:
    config = json.loads((place / "gpt2" / "config.json").read_text())
    rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    (place / "gpt2" / "config.json").write_text(json.dumps({**config, **rates}))
    words = [
        "--task", "text_generation", "--model_type", "gpt2", "--train_dataset", "./train",
        "--run_mode", "finetune", "--pet_method", "lora",
    ]  # fmt: skip
    split = ["--data_parallel", "1", "--model_parallel", "2", "--pipeline_parallel", "2"]
    run_in_processes(run_script, 4, [*words, *split, "--micro_size", "2"])
    losses = read_losses(place)
    adapter = load_file(place / "output" / "last" / "adapter_model.safetensors")
    shutil.rmtree(place / "output")
    # One process has no stages to fill: it takes the two micro-batches of an update as one batch.
    arguments = TrainingArguments(
        num_train_epochs=1, batch_size=4, learning_rate=0.001, warmup_steps=100, sink_size=2
    )
    trainer = Trainer(
        task="text_generation", model="gpt2", pet_method="lora", args=arguments,
        train_dataset="./train",
    )  # fmt: skip
    trainer.finetune()
    assert len(losses) > 1
    assert losses == pytest.approx(read_losses(place), rel=1e-5)
    alone = load_file(place / "output" / "last" / "adapter_model.safetensors")
    assert alone.keys() == adapter.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(adapter[name], tensor, rtol=1e-4, atol=1e-6)
    # Asked afterwards, it is the adapter that answers.
    assert trainer.predict(input_data="hello!")[0]["text_generation_text"]
    assert trainer._trained == Path("output", "last")
    answer = trainer.predict(input_data="hello!", max_new_tokens=4)
    # So does it in a new process: the document's prediction, in which two of four ranks are spare.
    later = Trainer(task="text_generation", model="gpt2", pet_method="lora", args=arguments)
    assert later._find_weights(None) == {"pretrained_model_name_or_path": "output/last"}
    assert later.predict(input_data="hello!", max_new_tokens=4) == answer
    asked = ["--task", "text_generation", "--model_type", "gpt2", "--pet_method", "lora",
             "--run_mode", "predict", "--data_parallel", "1", "--model_parallel", "2"]  # fmt: skip
    run_in_processes(run_script, 4, asked)


def check_trained(place: Path, model_parallel: int = 1, stages: int = 1) -> None:
    lines = (place / "output" / "metrics.jsonl").read_text().splitlines()
    assert any('"loss"' in line for line in lines)
    arguments = (place / "output" / "arguments.yaml").read_text()
    assert f"tensor_model_parallel_size: {model_parallel}" in arguments
    assert f"pipeline_model_parallel_size: {stages}" in arguments
    if stages > 1:
        assert "gradient_accumulation_steps: 2" in arguments
    GPT2LMHeadModel.from_pretrained(place / "output" / "last")


def test_verbs_in_one_process_use_what_was_trained(place: Path, caplog: Any) -> None:
    arguments = TrainingArguments(num_train_epochs=4, batch_size=2, learning_rate=0.01, sink_size=4)
    trainer = Trainer(arguments, "text_generation", "gpt2", None, "train", "eval")
    before = trainer.evaluate()
    assert f"evaluation | loss {before['loss']:.4f} | perplexity" in caplog.text
    trainer.finetune()
    after = trainer.evaluate()
    assert after["loss"] < before["loss"] and after["PPL"] < before["PPL"]
    typing = Trainer(arguments, "text_generation", "gpt2", None, "trian", "evla")
    with pytest.raises(ConfigurationError, match=r"trian: no such .*\n.*evla: no such"):
        typing.finetune()
    assert not (place / "output" / "previous").exists(), "the earlier run stays where it is"
    trainer.finetune(finetune_checkpoint=True)
    assert (place / "output" / "previous" / "last").is_dir()
    assert trainer.evaluate()["loss"] < after["loss"]
    answers = trainer.predict(input_data=["hello w1", "w3"], max_new_tokens=2)
    assert [list(answer) for answer in answers] == [["text_generation_text"]] * 2


def make_instance_trainer() -> Any:
    rows = make_rows(8)
    arguments = TrainingArguments(batch_size=4, num_train_epochs=1, remove_unused_columns=False)
    return Trainer(
        arguments, model=make_classifier(), train_dataset=rows, eval_dataset=rows,
        data_collator=collate,
    )  # fmt: skip


@pytest.mark.parametrize("verb", ["train", "finetune", "evaluate", "predict"])
def test_a_missing_checkpoint_of_an_instance_is_an_error(place: Path, verb: str) -> None:
    with pytest.raises(CheckpointError, match="nowhere holds no weights"):
        getattr(make_instance_trainer(), verb)("nowhere")


def test_an_instance_takes_the_weights_of_a_checkpoint(place: Path) -> None:
    trainer = make_instance_trainer()
    other = make_classifier()
    with torch.no_grad():
        other.classifier.bias += 2.0
    other.save_pretrained(place / "other")
    before = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate("other")["eval_loss"] != before
    assert torch.equal(trainer.model.classifier.bias, other.classifier.bias)
    trainer.finetune("other")
    trained = trainer.evaluate()["eval_loss"]
    trainer.evaluate("other")
    assert trainer.evaluate(True)["eval_loss"] == pytest.approx(trained, abs=1e-6)


def make_adapted_trainer() -> Any:
    rows = make_rows(8)
    arguments = TrainingArguments(batch_size=4, num_train_epochs=2, learning_rate=0.1)
    return Trainer(
        arguments, model=make_classifier(), train_dataset=rows, eval_dataset=rows,
        data_collator=collate, pet_method="lora",
    )  # fmt: skip


def test_a_new_trainer_of_an_instance_uses_the_adapter_that_was_trained(place: Path) -> None:
    """``predict`` and ``evaluate`` used a blank one without a word."""
    blank, trainer = make_adapted_trainer(), make_adapted_trainer()
    before = blank.evaluate()["eval_loss"]  # there is none yet
    trainer.finetune()
    trained = trainer.evaluate()["eval_loss"]
    assert trained != before
    assert make_adapted_trainer().evaluate()["eval_loss"] == pytest.approx(trained, abs=1e-6)
    rows = make_rows(8)
    answers = make_adapted_trainer().predict(input_data=rows).predictions
    assert answers == pytest.approx(trainer.predict(input_data=rows).predictions, abs=1e-6)


def test_do_eval_evaluates_after_every_epoch(place: Path) -> None:
    trainer = make_instance_trainer()
    trainer.train(do_eval=True)
    assert any("eval_loss" in line for line in trainer.state.log_history)


def test_weights_beside_the_run_are_read_where_they_are(place: Path) -> None:
    """Only the run's own best and last model move when an earlier run is set aside."""
    shutil.copytree(place / "gpt2", place / "output" / "mine")
    arguments = TrainingArguments(num_train_epochs=1, batch_size=4)
    trainer: Any = Trainer(arguments, "text_generation", "gpt2", None, "train")
    trainer.finetune("output/mine")
    assert (place / "output" / "last").is_dir()


def test_widths_that_do_not_fit_the_processes(place: Path) -> None:
    trainer = Trainer(task="text_generation", model="gpt2", train_dataset="train")
    trainer.set_parallel_config(data_parallel=1, model_parallel=2)
    with pytest.raises(ConfigurationError, match="= 2, but 1 processes run"):
        trainer.train()


def test_micro_batch_num_counts_with_a_pipeline_only(place: Path) -> None:
    trainer: Any = Trainer(task="text_generation", model="gpt2", train_dataset="train")
    trainer.set_parallel_config(micro_batch_num=4)
    assert trainer.build_settings().gradient_accumulation_steps == 1
    trainer.set_recompute_config(recompute=True)
    assert trainer.build_settings().checkpoint_activations


def test_what_is_refused_is_reported_at_once(place: Path) -> None:
    with pytest.raises(ConfigurationError) as error:
        Trainer(
            task="segment_anything", model="sam_vit_b", wrapper=1, data_collatr=collate,
            pet_method="adalora",
        )  # fmt: skip
    text = str(error.value)
    assert "segment_anything" in text and "wrapper=1" in text and "'data_collatr'" in text
    assert "pet_method='adalora' must be one of lora, ptuning2" in text
    trainer: Any = Trainer(task="text_generation", model="gpt2", train_dataset="train")
    with pytest.raises(ConfigurationError) as error:
        trainer.predict(input_data="hello", colour="red", temperature="hot")
    assert "predict(colour='red') is not supported" in str(error.value)


FILE = """
seed: 7
run_mode: 'train'
output_dir: './from_file'
load_checkpoint: ''
use_parallel: False
trainer: {type: CausalLanguageModelingTrainer, model_name: 'gpt2'}
runner_config: {epochs: 1, batch_size: 4, sink_mode: True, sink_size: 2}
optimizer: {type: FP32StateAdamWeightDecay, betas: [0.9, 0.95], eps: 1.0e-6, weight_decay: 0.2}
lr_schedule: {type: CosineWithWarmUpLR, learning_rate: 0.001, lr_end: 1.0e-5, warmup_steps: 1,
              total_steps: -1}
train_dataset: {batch_size: 4, data_loader: {type: MindDataset, dataset_dir: "train"}}
parallel_config: {data_parallel: 8, model_parallel: 2, vocab_emb_dp: True}
recompute_config: {recompute: True, select_recompute: False}
callbacks:
  - type: MFLossMonitor
  - {type: CheckpointMointor, save_checkpoint_steps: 2, keep_checkpoint_max: 3}
runner_wrapper: {type: MFTrainOneStepCell, use_clip_grad: True}
context: {mode: 0, device_target: "Ascend"}
"""


def test_a_file_of_mindformers(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (place / "run.yaml").write_text(FILE)
    trainer: Any = Trainer("run.yaml")
    settings = trainer.build_settings()
    wanted = {
        "seed": 7, "save": "from_file", "micro_batch_size": 4, "lr": 1e-3, "min_lr": 1e-5,
        "lr_warmup_iters": 1, "weight_decay": 0.2, "adam_beta2": 0.95, "adam_eps": 1e-6,
        "log_interval": 2, "save_interval": 2, "save_total_limit": 3, "epochs": 1.0,
        "lr_decay_style": "cosine", "checkpoint_activations": True,
        "tensor_model_parallel_size": 1,
    }  # fmt: skip
    assert {name: getattr(settings, name) for name in wanted} == wanted
    trainer.train()
    assert (place / "from_file" / "last" / "config.json").is_file()
    said = capfd.readouterr().err
    assert "run.yaml: not used here: context.mode, runner_wrapper.type" in said
    (place / "run.yaml").write_text(FILE.replace("type: CosineWithWarmUpLR", "type: Own")
                                    .replace("{batch_size: 4,", "{batch_size: 8,"))  # fmt: skip
    with pytest.raises(ConfigurationError) as error:
        Trainer("run.yaml")
    assert "lr_schedule.type Own" in str(error.value) and "are one value" in str(error.value)
    with pytest.raises(ConfigurationError, match=r"'none\.yaml' cannot be read"):
        Trainer("none.yaml")


def test_callbacks_and_metrics_with_a_models_name(place: Path) -> None:
    events: list[str] = []

    class Sees(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            assert details["model"] is not None and details["optimizer"] is not None
            assert {"eval_loss", "eval_right"} <= details["metrics"].keys()
            events.append(f"evaluated at {state.global_step}")

        def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            control.should_training_stop = state.global_step == 2

    def count_right(prediction: Any) -> dict[str, float]:
        guesses = prediction.predictions.argmax(-1)[:, :-1]
        return {"right": float((guesses == prediction.label_ids[:, 1:]).mean())}

    arguments = TrainingArguments(
        num_train_epochs=1, batch_size=2, learning_rate=0.01, metric_for_best_model="right"
    )
    trainer = Trainer(
        arguments, "text_generation", "gpt2", None, "train", "eval", callbacks=[Sees()],
        compute_metrics=count_right,
    )  # fmt: skip
    metrics = trainer.train(do_eval=True)
    assert events == ["evaluated at 2"]
    assert metrics["right"] == pytest.approx(trainer.evaluate()["right"], abs=1e-6)


def test_sampling_in_predict(place: Path) -> None:
    trainer: Any = Trainer(task="text_generation", model="gpt2")
    several = {"do_sample": True, "temperature": 2.0, "top_k": 9, "num_return_sequences": 3}
    given = {"input_data": ["hello w1", "w3"], "max_new_tokens": 6, **several}
    first, again = (trainer.predict(**given, seed=1) for _ in range(2))
    assert first == again != trainer.predict(**given, seed=2)
    assert [len(each["text_generation_text"]) for each in first] == [3, 3]


def test_an_instance_predicts_in_batches_of_any_size(place: Path) -> None:
    trainer, sizes = make_instance_trainer(), []
    trainer.model.register_forward_pre_hook(
        lambda _, args, named: sizes.append(len(named["input_ids"])), with_kwargs=True
    )
    whole = trainer.predict(input_data=make_rows(8), batch_size=8).predictions
    assert sizes == [8]
    assert trainer.predict(input_data=make_rows(8)).predictions == pytest.approx(whole, abs=1e-6)
    assert sizes == [8, 4, 4]


def test_one_batch_size_under_two_names() -> None:
    with pytest.raises(ConfigurationError, match="are one value"):
        TrainingArguments(batch_size=2, per_device_train_batch_size=4)


def test_rank_variables(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    devices = [{"rank_id": "0"}, {"rank_id": "1"}]
    table.write_text(json.dumps({"server_list": [{"server_id": "10.0.0.7", "device": devices}]}))
    variables = {
        "RANK_ID": "1",
        "RANK_SIZE": "2",
        "DEVICE_ID": "5",
        "RANK_TABLE_FILE": str(table),
    }
    code = (
        "import os\nfrom rapidformer.dialects.mindformers import TrainingArguments\n"
        "print(os.environ.get('RANK'))\nTrainingArguments()\nprint(os.environ['RANK'])"
    )
    real = [sys.executable, "-c", code]
    printed = subprocess.run(real, env={**os.environ, **variables}, capture_output=True, text=True)
    assert printed.stdout == "None\n1\n", "not on import, but on the first call" + printed.stderr
    adopt_rank_variables(variables)
    assert [variables[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")] == [
        "1", "2", "5", "10.0.0.7",
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match="lists 2 devices"):
        adopt_rank_variables({"RANK_ID": "0", "RANK_SIZE": "3", "RANK_TABLE_FILE": str(table)})


def test_keywords_of_the_context_that_do_nothing_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from rapidformer.dialects.mindformers import ContextConfig, ParallelContextConfig

    with caplog.at_level("INFO"):
        ContextConfig(device_target="CPU", max_devce_memory="30GB")
        ParallelContextConfig("DATA_PARALLEL", loss_repeated_mean=True)
    assert "ContextConfig: not used here: max_devce_memory." in caplog.text
    assert "ParallelContextConfig: not used here: loss_repeated_mean." in caplog.text


def test_an_adapter_that_is_not_there_is_said(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer: Any = Trainer(task="text_generation", model="gpt2", pet_method="lora")
    trainer.predict(input_data="hello!", max_new_tokens=2)
    assert "pet_method='lora': output holds no trained adapter" in caplog.text
