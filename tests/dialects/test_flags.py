"""Other systems' names: each one is a flag, a YAML key and an attribute of the same setting."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rapidformer.config import arguments_from_mapping, get_settings, parse_arguments
from rapidformer.config.schema import Setting
from rapidformer.dialects.flags import FLAGS
from rapidformer.foreign_names import find_names

# What the peers call things, from trainers.md and design.md: not read from our own table.
KNOWN_NAMES = {
    "learning_rate": "lr",
    "num_train_epochs": "epochs",
    "max_steps": "train_iters",
    "per_device_train_batch_size": "micro_batch_size",
    "output_dir": "save",
    "warmup_steps": "lr_warmup_iters",
    "warmup_ratio": "lr_warmup_fraction",
    "max_grad_norm": "clip_grad",
    "model_parallel": "tensor_model_parallel_size",
    "dataset_name": "data_name",
    "dataset_path": "data_path",
    "encoder_seq_length": "seq_length",
}


def sample_value(setting: Setting) -> object:
    if setting.is_switch:
        return True
    if setting.choices:
        return setting.choices[-1]
    return {int: 7, float: 0.25, str: "text"}[setting.kind]


@pytest.mark.parametrize(("alias", "name"), FLAGS.aliases.items())
def test_alias_is_flag_yaml_key_and_attribute(alias: str, name: str, tmp_path: Path) -> None:
    settings = get_settings()
    assert name in settings, "an alias must lead to a setting"
    assert alias not in settings, "an alias must not hide a setting"
    value = sample_value(settings[name])
    flag = "--" + alias.replace("_", "-")
    words = [flag] if value is True else [flag, str(value)]
    from_flag = parse_arguments(words)
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({alias: value}))
    from_yaml = parse_arguments(["--config", str(file)])
    from_code = arguments_from_mapping({alias: value})
    for args in (from_flag, from_yaml, from_code):
        assert getattr(args, name) == value
        assert getattr(args, alias) == value
        assert args.is_given(name)


@pytest.mark.parametrize(("alias", "name"), KNOWN_NAMES.items())
def test_names_of_other_systems_are_known(alias: str, name: str) -> None:
    assert FLAGS.aliases[alias] == name


@pytest.mark.parametrize("name", find_names(FLAGS.names, "ignored"))
def test_flags_without_effect_are_accepted(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    args = parse_arguments([flag, "--lr", "1"])
    assert args.lr == 1
    assert name in args.extras
    assert parse_arguments([flag, "value", "--lr", "1"]).extras[name] == "value"


def test_flags_without_effect_keep_megatrons_spelling() -> None:
    assert parse_arguments(["--DDP-impl", "local"]).DDP_impl == "local"
    assert parse_arguments(["--DDP_impl", "local"]).DDP_impl == "local"


def test_yaml_key_without_effect_is_remembered_so_that_it_can_be_said(tmp_path: Path) -> None:
    """The engine warns about args.extras: a key that is dropped here is never told of."""
    file = tmp_path / "a.yaml"
    file.write_text("distributed_backend: nccl\nlr: 1\n")
    assert "distributed_backend" in parse_arguments(["--config", str(file)]).extras
