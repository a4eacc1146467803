"""EasyNLP's flags, and those of Megatron's scripts that do nothing or are refused."""

from __future__ import annotations

import pytest

from rapidformer.config import parse_arguments
from rapidformer.config.switches import Situation
from rapidformer.engine import runtime
from rapidformer.errors import ConfigurationError


def test_user_defined_parameters_set_settings_and_extras() -> None:
    args = parse_arguments(
        ["--lr", "2", "--user-defined-parameters",
         "pretrain_model_name_or_path=bert learning_rate=1 label_enumerate_values=0,1"]
    )  # fmt: skip
    assert args.pretrained_model_name_or_path == "bert"
    assert args.lr == 2, "a flag of its own wins"
    assert args.label_enumerate_values == "0,1"
    assert args.user_defined_parameters.startswith("pretrain_model")


def test_user_defined_parameters_must_have_values() -> None:
    with pytest.raises(ConfigurationError, match="'lonely' must be key=value"):
        parse_arguments(["--user_defined_parameters=lonely"])


def test_app_name_chooses_the_task_where_task_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(runtime, "warn_once", said.append)
    alone = parse_arguments(["--app-name", "text_classify"])
    both = parse_arguments(["--app-name", "text_classify", "--task", "masked_lm"])
    assert (alone.task, both.task) == ("sequence_classification", "masked_lm")
    runtime._warn_about_settings_without_effect(alone, Situation())
    assert not said, "it has an effect"
    runtime._warn_about_settings_without_effect(both, Situation())
    assert said[0].startswith("--app-name has no effect: --task overrides it")


def test_flags_without_effect_are_reported_without_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(runtime, "warn_once", said.append)
    runtime._warn_about_settings_without_effect(
        parse_arguments(["--DDP-impl", "local"]), Situation()
    )
    assert said == ["--DDP-impl has no effect: gradients are always reduced by torch.distributed."]


def test_flags_of_megatrons_scripts() -> None:
    args = parse_arguments(
        ["--use-distributed-optimizer", "--valid-batch-size", "4", "--recompute-method", "uniform",
         "--log-timers-to-tensorboard"]
    )  # fmt: skip
    assert args.zero_stage == 1 and args.eval_micro_batch_size == 4


def test_mixture_flags_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_arguments(["--mlp-type", "residual", "--router-type", "base"])
    assert "--mlp-type is not supported: --num-experts" in str(error.value)
    assert "--router-type is not supported" in str(error.value)
