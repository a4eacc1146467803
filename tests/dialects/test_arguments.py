"""``TrainingArguments``: transformers' names, defaults and parser, and what each becomes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import HfArgumentParser, IntervalStrategy, SchedulerType
from transformers.trainer_pt_utils import AcceleratorConfig

import rapidformer
from rapidformer import Seq2SeqTrainingArguments, TrainingArguments
from rapidformer.config import Settings, parse_arguments, resolve
from rapidformer.config.schema import get_settings, render_arguments
from rapidformer.dialects.huggingface.names import HUGGING_FACE
from rapidformer.dialects.huggingface.settings import build_settings
from rapidformer.errors import ConfigurationError

THEIRS = dataclasses.fields(transformers.TrainingArguments)


def test_names_order_and_defaults_are_those_of_transformers() -> None:
    ours = dataclasses.fields(TrainingArguments)
    assert [f.name for f in ours] == [f.name for f in THEIRS]
    assert len(ours) == 112
    assert [f.default for f in ours] == [getattr(f.default, "value", f.default) for f in THEIRS]


def test_every_name_has_a_row_that_says_what_becomes_of_it() -> None:
    assert list(HUGGING_FACE) and set(HUGGING_FACE) == {f.name for f in THEIRS}
    for name, row in HUGGING_FACE.items():
        assert row.setting or row.note, name
        assert not row.setting or row.setting in get_settings(), name
        if row.outcome in ("ignored", "refused"):
            assert row.note and not row.setting, name


def _find_other_value(each: dataclasses.Field[Any]) -> Any:
    kind = str(each.type)
    if each.default is True or each.default is False or "bool" in kind:
        return not each.default
    if "int" in kind or "float" in kind:
        return 7
    return {"x": 1} if "dict" in kind else "x"


@pytest.mark.parametrize("name", [n for n, r in HUGGING_FACE.items() if r.outcome == "refused"])
def test_a_refused_name_says_why(name: str) -> None:
    each = next(f for f in dataclasses.fields(TrainingArguments) if f.name == name)
    with pytest.raises(ConfigurationError, match=rf"TrainingArguments\({name}=.*not supported: "):
        TrainingArguments("out", **{name: _find_other_value(each)})


@pytest.mark.parametrize("name", [n for n, r in HUGGING_FACE.items() if r.outcome == "ignored"])
def test_an_ignored_name_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("rapidformer.dialects.calls.warn_once", told.append)
    each = next(f for f in dataclasses.fields(TrainingArguments) if f.name == name)
    TrainingArguments("out", **{name: _find_other_value(each)})
    assert told == [f"TrainingArguments({name}=...) has no effect: {HUGGING_FACE[name].note}."]


def test_positional_folder_mutable_and_readable() -> None:
    arguments = TrainingArguments("test-trainer")
    assert arguments.output_dir == "test-trainer"
    arguments.learning_rate = 1e-3
    assert build_settings(arguments).lr == 1e-3
    lines = str(arguments).splitlines()
    assert lines[:4] == [
        "TrainingArguments(", "    output_dir='test-trainer',", "    learning_rate=0.001,",
        "    # defaults",
    ]  # fmt: skip
    assert len(lines) == 112 + 3
    assert TrainingArguments().output_dir == "trainer_output"
    assert "secret" not in str(TrainingArguments(hub_token="secret"))


def test_the_argument_parser_of_transformers_takes_it() -> None:
    flags = "--output_dir out --fp16 --eval_steps 0.5 --eval_strategy steps --label_names a b"
    words = f"{flags} --max_steps 10 --no_remove_unused_columns".split()
    parser: Any = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    (arguments,) = parser.parse_args_into_dataclasses([*words, "--deepspeed", '{"a": 1}'])
    assert (arguments.fp16, arguments.eval_steps, arguments.label_names) == (True, 0.5, ["a", "b"])
    assert arguments.deepspeed == {"a": 1} and arguments.remove_unused_columns is False
    (read,) = parser.parse_dict({"output_dir": "out", "seed": 3})
    assert read.seed == 3


def test_values_in_their_spelling(tmp_path: Path) -> None:
    settings = build_settings(
        TrainingArguments(
            str(tmp_path), max_steps=20, num_train_epochs=2.5, warmup_steps=0.1,
            lr_scheduler_type="constant_with_warmup", optim="adamw_torch",
            eval_strategy=IntervalStrategy.STEPS,
            eval_steps=0.25, save_steps=5, logging_steps=2, save_only_model=True, use_cpu=True,
            dataloader_drop_last=True, train_sampling_strategy="group_by_length", ddp_timeout=600,
            label_smoothing_factor=0.1, metric_for_best_model="eval_f1", disable_tqdm=True,
        )
    )  # fmt: skip
    wanted = {
        "train_iters": 20, "epochs": None, "lr_decay_style": "constant", "lr_warmup_fraction": 0.1,
        "optimizer": "adamw", "eval_strategy": "steps", "eval_interval": 0.25, "save_interval": 5,
        "log_interval": 2, "save_optim": False, "save_rng": False, "device": "cpu",
        "keep_last": False, "group_by_length": True, "distributed_timeout_minutes": 10.0,
        "label_smoothing": 0.1, "greater_is_better": True, "progress": False,
    }  # fmt: skip
    assert {name: getattr(settings, name) for name in wanted} == wanted


def test_the_defaults_are_hugging_faces() -> None:
    settings = resolve(build_settings(TrainingArguments("out")))
    wanted = {
        "lr": 5e-5, "epochs": 3, "train_iters": None, "weight_decay": 0.0, "seed": 42,
        "micro_batch_size": 8, "eval_strategy": "no", "save_strategy": "steps",
        "save_interval": 500, "log_interval": 500, "log_first_step": False, "clip_grad": 1.0,
        "lr_decay_style": "linear", "num_workers": 0, "dataloader_type": "cyclic",
    }  # fmt: skip
    assert {name: getattr(settings, name) for name in wanted} == wanted
    assert not settings.is_given("lr") and settings.is_given("save")


def test_warm_up_by_steps_by_share_and_without() -> None:
    assert build_settings(TrainingArguments(warmup_steps=7)).lr_warmup_iters == 7
    constant = build_settings(TrainingArguments(warmup_steps=7, lr_scheduler_type="constant"))
    assert constant.lr_warmup_iters == 0
    assert TrainingArguments(warmup_steps=0.1).get_warmup_steps(25) == 3


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"fsdp": "full_shard auto_wrap"}, {"zero_3_memory_optimization": True}),
        ({"fsdp": "shard_grad_op"}, {"zero_2_memory_optimization": True}),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}},
         {"zero_2_memory_optimization": True}),
        ({"fsdp": ["full_shard", "offload"]},
         {"zero_3_memory_optimization": True, "cpu_offload": True}),
        ({"fsdp": True, "fsdp_config": {"fsdp_activation_checkpointing": "true"}},
         {"zero_3_memory_optimization": True, "checkpoint_activations": True}),
        ({"parallelism_config": {"tp_size": 2, "dp_shard_size": 2}},
         {"tensor_model_parallel_size": 2, "zero_3_memory_optimization": True}),
        ({"torch_compile_backend": "aot_eager"}, {"compile": True, "compile_backend": "aot_eager"}),
        ({}, {"zero_3_memory_optimization": False, "cpu_offload": False}),
    ],
)  # fmt: skip
def test_sharding_and_parallelism(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    settings = build_settings(TrainingArguments("out", **given))
    assert {name: getattr(settings, name) for name in wanted} == wanted


def test_a_deepspeed_dictionary_is_part_of_the_settings(tmp_path: Path) -> None:
    """So the run can be repeated from its arguments.yaml alone."""
    content = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}
    settings = build_settings(TrainingArguments(str(tmp_path), deepspeed=content))
    assert json.loads(settings.deepspeed or "") == content
    (tmp_path / "arguments.yaml").write_text("\n".join(render_arguments(settings)))
    repeated = parse_arguments(["--config", str(tmp_path / "arguments.yaml")])
    assert repeated.deepspeed == settings.deepspeed
    # The file wins over a default of Hugging Face's; a value that was given must agree with it.
    assert resolve(settings).micro_batch_size == 4
    with pytest.raises(ConfigurationError, match="train_micro_batch_size_per_gpu"):
        resolve(
            build_settings(
                TrainingArguments(str(tmp_path), deepspeed=content, per_device_train_batch_size=2)
            )
        )


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        TrainingArguments(
            "out", optim="lion_32bit", lr_scheduler_type="greedy", fsdp="all_of_it",
            learning_rate="fast", auto_find_batch_size=True,
        )  # type: ignore[arg-type]  # fmt: skip
    text = str(caught.value)
    for part in ("optim='lion_32bit'", "lr_scheduler_type='greedy'", "'all_of_it'",
                 "lr in TrainingArguments needs a number", "auto_find_batch_size"):  # fmt: skip
        assert part in text
    assert len(caught.value.problems) == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eval_strategy": "sometimes"}, "eval_strategy in TrainingArguments"),
        ({"save_steps": [1]}, r"save_steps must be a number, got \[1\]"),
        ({"max_steps": [1], "fp16": True, "bf16": True}, r"max_steps must .*[\s\S]*contradict"),
        ({"warmup_steps": "1"}, "warmup_steps must be a number, got '1'"),
        ({"learning_rate": [1]}, r"learning_rate must be a number, got \[1\]"),
        ({"logging_steps": 10.5}, r"logging_steps must be whole, or below 1 .*, got 10.5"),
        ({"logging_steps": 0}, "logging_strategy='steps' needs logging_steps above 0"),
        ({"warmup_steps": -1}, "warmup_steps must not be negative, got -1"),
        ({"fp16_full_eval": True, "bf16_full_eval": True}, "_full_eval=True contradict each other"),
        ({"torch_empty_cache_steps": -1}, "must be a whole number of at least 1, got -1"),
        ({"fp16": True, "bf16": True}, "fp16=True and bf16=True contradict each other"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "looks at metrics: set eval_strategy"),
        ({"accelerator_config": {"split": True}}, "accelerator_config: 'split' is not one of"),
        ({"accelerator_config": AcceleratorConfig}, "accelerator_config=.* cannot be read"),
        ({"accelerator_config": "nowhere.json"}, "_config=.nowhere.json. cannot be read"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"steps": 4}}},
            "'steps' in gradient_accumulation_kwargs is not one of num_steps, adjust_scheduler",
        ),
        (
            {
                "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}},
                "gradient_accumulation_steps": 2,
            },
            "says num_steps=4, and gradient_accumulation_steps is 2: give one of them",
        ),
    ],
)
def test_mistakes_are_found_where_they_are_made(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingArguments("out", **given)


def test_words_of_transformers_become_plain_ones() -> None:
    assert TrainingArguments(report_to="none").report_to == []
    assert TrainingArguments(report_to="tensorboard").report_to == ["tensorboard"]
    counting = TrainingArguments(include_num_input_tokens_seen=True)  # type: ignore[arg-type]
    assert counting.include_num_input_tokens_seen == "all"
    arguments = TrainingArguments("out").set_optimizer("sgd", learning_rate=0.5)
    arguments.set_evaluate("steps", steps=7).set_lr_scheduler("cosine", num_epochs=2)
    settings = build_settings(arguments)
    wanted = {"optimizer": "sgd", "lr": 0.5, "eval_interval": 7, "lr_decay_style": "cosine",
              "epochs": 2}  # fmt: skip
    assert {name: getattr(settings, name) for name in wanted} == wanted
    assert not hasattr(arguments, "nonsense")


@pytest.mark.parametrize("kind", [dict, AcceleratorConfig])
def test_accumulation_may_be_said_in_the_accelerators_configuration(kind: Any) -> None:
    config = kind(gradient_accumulation_kwargs={"num_steps": 10}, split_batches=True)
    arguments = TrainingArguments("out", accelerator_config=config)
    assert arguments.gradient_accumulation_steps == 10
    assert build_settings(arguments).gradient_accumulation_steps == 10


def test_the_accelerators_configuration_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "accelerator.json"
    path.write_text('{"gradient_accumulation_kwargs": {"num_steps": 3}, "even_batches": false}')
    arguments: Any = TrainingArguments("out", accelerator_config=str(path))
    assert arguments.accelerator_config.even_batches is False
    assert build_settings(arguments).gradient_accumulation_steps == 3


def test_the_accelerators_configuration_is_there_to_be_changed(tmp_path: Path) -> None:
    arguments: Any = TrainingArguments(str(tmp_path))
    theirs: Any = transformers.TrainingArguments(str(tmp_path)).accelerator_config
    assert arguments.to_dict()["accelerator_config"] == dataclasses.asdict(theirs)
    assert "accelerator_config" not in str(arguments).partition("# defaults")[0]
    arguments.accelerator_config.dispatch_batches = False
    arguments.accelerator_config.gradient_accumulation_kwargs = {"num_steps": 3}
    assert build_settings(arguments).gradient_accumulation_steps == 3


def test_batches_that_all_processes_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigurationError, match=r"=8 counts the rows of all 4 processes.*by 4"):
        TrainingArguments("out", accelerator_config={"split_batches": True})


def test_kubeflow_hears_of_a_run_that_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://there")
    assert TrainingArguments("out").report_to == ["kubeflow"]
    given = TrainingArguments("out", report_to=["tensorboard", "kubeflow"])
    assert given.report_to == ["tensorboard", "kubeflow"]
    monkeypatch.setenv("DISABLE_KUBEFLOW_INTEGRATION", "true")
    assert TrainingArguments("out").report_to == []


def test_fields_of_a_subclass_are_written_as_transformers_does() -> None:
    @dataclasses.dataclass
    class Own(TrainingArguments):
        kind: Any = SchedulerType.COSINE
        dtype: Any = torch.bfloat16
        init: Any = dataclasses.field(default_factory=lambda: {"dtype": torch.float16})

    values = Own("out", accelerator_config=AcceleratorConfig(split_batches=True)).to_dict()
    found = values["kind"], values["dtype"], values["init"]
    assert found == ("cosine", "bfloat16", {"dtype": "float16"})
    assert values["accelerator_config"]["split_batches"] is True


def test_the_launchers_flags_reach_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPIDFORMER_FLAGS", "--device cpu")
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "7", "--run_mode", "x"])
    settings = build_settings(TrainingArguments("out"))
    assert settings.device == "cpu"
    assert settings.lr == 5e-5  # a script's own flags are its own


def test_one_public_class_and_one_internal_one() -> None:
    assert rapidformer.TrainingArguments is not Settings
    assert not hasattr(rapidformer, "Settings")


def test_settings_built_directly_know_what_was_said() -> None:
    settings = Settings(global_batch_size=32)
    assert settings.is_given("global_batch_size") and not settings.is_given("lr")


@pytest.mark.parametrize("cls", [TrainingArguments, Seq2SeqTrainingArguments])
def test_names_of_transformers_4_keep_the_script_hugging_faces(cls: Any) -> None:
    arguments = cls("out", warmup_ratio=0.1, evaluation_strategy="epoch")
    assert type(arguments) is cls
    assert (arguments.warmup_steps, arguments.eval_strategy) == (0.1, "epoch")
    assert (arguments.lr_scheduler_type, arguments.logging_steps) == ("linear", 500)
    assert cls("out", warmup_ratio=0.1, warmup_steps=7).warmup_steps == 7
    with pytest.raises(ConfigurationError, match="warmup_ratio must be at least 0 and below 1"):
        cls("out", warmup_ratio=1.5)
    arguments = cls(
        "out", no_cuda=True, group_by_length=True, include_inputs_for_metrics=True,
        overwrite_output_dir=True, logging_dir="logs", save_safetensors=True,
    )  # fmt: skip
    assert arguments.use_cpu and arguments.include_for_metrics == ["inputs"]
    assert arguments.train_sampling_strategy == "group_by_length"
    assert cls("out", group_by_length=False).train_sampling_strategy == "random"


@pytest.mark.parametrize("cls", [TrainingArguments, Seq2SeqTrainingArguments])
def test_names_of_transformers_4_on_the_command_line(cls: Any) -> None:
    def parse(text: str) -> Any:
        return HfArgumentParser(cls).parse_args_into_dataclasses(text.split())[0]

    arguments = parse("--output_dir out --warmup_ratio 0.1 --evaluation_strategy epoch")
    assert (arguments.warmup_steps, arguments.eval_strategy) == (0.1, "epoch")
    assert parse("--warmup-ratio 0.2").warmup_steps == 0.2
    assert parse("--warmup_steps 7 --warmup_ratio 0.0").warmup_steps == 7
    assert parse("").warmup_steps == 0
    with pytest.raises(SystemExit):
        parse("--warmup_ratio 1.5")
