"""Help and ``--print-config``, both generated from the settings."""

from __future__ import annotations

import shutil
import sys
import textwrap
from itertools import groupby

from rapidformer.cli import COMMANDS
from rapidformer.config import Setting, get_settings, parse_arguments, resolve
from rapidformer.config.schema import render_arguments
from rapidformer.errors import ConfigurationError
from rapidformer.foreign_names import get_foreign_flags
from rapidformer.launch.environment import plan_launch

_INTRODUCTION = """\
usage: rapidformer [COMMAND] --flag value ...

  rapidformer --task sequence_classification --data-path glue --data-name mrpc \\
      --pretrained-model-name-or-path bert-base-cased --lr 2e-5 --save runs/mrpc
  rapidformer --user-script my_finetuner.py --epochs 3
"""
_USAGES = {
    "evaluate": "rapidformer evaluate --load RUN [--data-path DATA] [--eval-split test]",
    "predict": "rapidformer predict --load RUN --input TEXT|FILE|- ... [--output FILE]",
    "explain": "rapidformer explain FLAGS OF A RUN",
    "tasks": "rapidformer tasks [TASK ...]",
}
# The flags that most people need, by command; topics show the others.
_COMMON = {
    "train": (
        "task", "user_script", "config", "pretrained_model_name_or_path", "data_path", "data_name",
        "validation_split", "seq_length", "epochs", "micro_batch_size", "global_batch_size", "lr",
        "lora_rank", "mixed_precision", "compile", "nproc_per_node", "save", "load",
    ),
    "evaluate": (
        "load", "task", "data_path", "data_name", "eval_split", "max_eval_samples",
        "eval_micro_batch_size", "mixed_precision", "nproc_per_node", "output",
    ),
    "predict": (
        "load", "task", "input", "data_path", "output", "max_new_tokens", "do_sample",
        "temperature", "num_beams", "stream", "chat", "eval_micro_batch_size", "mixed_precision",
        "nproc_per_node",
    ),
}  # fmt: skip
TOPICS = {
    "run": "What to run", "model": "Model", "data": "Data", "preferences": "Preferences",
    "rewards": "Learning from rewards", "reference": "Reference model",
    "distillation": "Distillation", "embeddings": "Embeddings and rerankers",
    "speech": "Speech and audio", "generation": "Text generation",
    "training": "Training", "optimizer": "Optimizer and learning rate", "adapters": "Adapters",
    "switches": "Acceleration switches", "parallelism": "Parallelism",
    "checkpoints": "Checkpoints", "logging": "Logging", "launch": "Launch",
}  # fmt: skip
_ENDING = """
Every switch has a --no- form. Names that other trainers use are accepted too
(--learning-rate, ...; docs/coming_from/flags.md has them), as are underscores.
"""


def show_help(command: str | None, topic: str | None = None) -> None:
    """A short page, or the flags of a topic: a section, ``all``, or a word to search for."""
    write = sys.stdout.write
    if topic is not None:
        write(_format_topic(topic))
        return
    write(_format_introduction(command))
    if command == "tasks":
        return
    settings = get_settings()
    write("\ncommon flags\n")
    for name in _COMMON.get(command or "train", _COMMON["train"]):
        write(format_setting(settings[name]))
    topics = f"\n{'':31}".join(textwrap.wrap(", ".join(TOPICS), 48))
    write(
        "\nmore help\n"
        f"  rapidformer --help TOPIC     {topics}\n"
        "  rapidformer --help WORD      flags that mention a word, such as dropout\n"
        f"  rapidformer --help all       all {len(settings)} flags\n"
        "  rapidformer COMMAND --help   a command and its flags\n"
        "  --print-config               after your flags: every value and its origin\n"
    )


def _format_introduction(command: str | None) -> str:
    if command in _USAGES:
        return f"usage: {_USAGES[command]}\n\n{COMMANDS[command]}\n"
    lines = [f"  {name:<12}{text}\n" for name, text in COMMANDS.items()]
    return f"{_INTRODUCTION}\ncommands\n{''.join(lines)}"


def _format_topic(topic: str) -> str:
    settings = _find_settings(topic.lower().replace("_", "-"))
    if not settings:
        raise ConfigurationError(
            f"no flag mentions {topic!r}: use --help with another word, all, or a topic "
            f"({', '.join(TOPICS)})."
        )
    text = ""
    for section, group in groupby(settings, key=lambda setting: setting.section):
        text += f"\n{section.lower()}\n" + "".join(map(format_setting, group))
    return text.removeprefix("\n") + _ENDING


def _find_settings(topic: str) -> list[Setting]:
    settings = get_settings()
    everything = list(settings.values())
    if topic == "all":
        return everything
    if topic in TOPICS:
        return [setting for setting in everything if setting.section == TOPICS[topic]]
    name = topic.removeprefix("--").replace("-", "_")
    if topic.startswith("--"):
        name = get_foreign_flags().aliases.get(name, name).removeprefix("no_")
        return [settings[name]] if name in settings else []
    texts = {setting.name: f"{setting.name} {setting.help}".lower() for setting in everything}
    return [s for s in everything if name in texts[s.name] or topic in texts[s.name]]


def format_setting(setting: Setting) -> str:
    """The flag, its values and its meaning, as wide as the terminal."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    left = "  " + setting.flag + _format_value(setting)
    text = setting.help
    if _has_many_choices(setting):
        text += f": {', '.join(setting.choices)}"
    if setting.is_switch and setting.default is True:
        left, text = "  " + setting.flag.replace("--", "--[no-]", 1), f"{text} (default: on)"
    elif setting.default not in (None, False) and "default" not in text:
        text += f" (default: {setting.default})"
    lines = textwrap.wrap(text, max(width - 40, 30), break_on_hyphens=False) or [""]
    first = f"{left:<39} {lines[0]}" if len(left) < 39 else f"{left}\n{'':<39} {lines[0]}"
    return "\n".join([first, *(f"{'':<39} {line}" for line in lines[1:])]) + "\n"


def _has_many_choices(setting: Setting) -> bool:
    """Whether there are more choices than fit next to the flag."""
    return len(" ".join(setting.choices)) > 60


def _format_value(setting: Setting) -> str:
    if setting.is_switch:
        return ""
    if setting.choices and not _has_many_choices(setting):
        # As in config/parse.py: a flag that is off by default means auto if it has no value.
        is_optional = "auto" in setting.choices and setting.default is None
        named = [choice for choice in setting.choices if not is_optional or choice != "auto"]
        return f" [{'|'.join(named or setting.choices)}]" if is_optional else f" {'|'.join(named)}"
    name = {int: "N", float: "X", str: "TEXT"}[setting.kind]
    return f" {name} ..." if setting.is_list or setting.is_one_or_many else f" {name}"


def print_config(argv: list[str]) -> None:
    """Every setting as YAML that ``--config`` reads back, with the origin of each value."""
    args = parse_arguments(argv)
    # Accumulation depends on the number of processes that this command would start.
    for line in render_arguments(resolve(args, world_size=plan_launch(args).world_size)):
        sys.stdout.write(line + "\n")
