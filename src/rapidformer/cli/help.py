"""Help and ``--print-config``, both generated from the settings."""

from __future__ import annotations

import shutil
import sys
import textwrap
from itertools import groupby

from rapidformer.cli.commands import COMMANDS
from rapidformer.config import Setting, get_settings, parse_arguments, resolve
from rapidformer.config.render import render_arguments
from rapidformer.launch.environment import plan_launch

_INTRODUCTION = """\
usage: rapidformer [command] --flag value ...

  rapidformer --task sequence_classification --pretrained-model-name-or-path bert-base-cased \\
      --data-path glue --data-name mrpc --epochs 3 --lr 2e-5 --save runs/mrpc --mixed-precision
  rapidformer --user-script my_finetuner.py --epochs 3 ...
"""
_COMMON = {
    "evaluate": "rapidformer evaluate --load RUN [--data-path DATA] [--eval-split test]",
    "predict": "rapidformer predict --load RUN --input TEXT ... | FILE | - [--output FILE]",
    "plot": "rapidformer plot RUN [--output curve.png]",
    "tasks": "rapidformer tasks",
}


def show_help(command: str | None) -> None:
    """Everything on one page, grouped like the settings."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    write = sys.stdout.write
    if command in ("tasks", "plot"):
        write(f"usage: {_COMMON[command]}\n\n{COMMANDS[command][2]}\n")
        return
    if command in _COMMON:
        write(f"usage: {_COMMON[command]}\n\n{COMMANDS[command][2]}\n")
    else:
        write(_INTRODUCTION)
        write("\ncommands\n")
        for name, (_, _, text) in COMMANDS.items():
            write(f"  {name:<12}{text}\n")
    for section, settings in groupby(get_settings().values(), key=lambda setting: setting.section):
        write(f"\n{section.lower()}\n")
        for setting in settings:
            write(format_setting(setting, width))
    write(
        "\nEvery switch has a --no- form. The names that Hugging Face, Megatron, FlagAI and\n"
        "MindFormers use are accepted too (--learning-rate, --per-device-train-batch-size, ...),\n"
        "as are underscores. --print-config shows every value and where it comes from.\n"
    )


def format_setting(setting: Setting, width: int) -> str:
    left = "  " + setting.flag + _format_value(setting)
    text = setting.help
    if _has_many_choices(setting):
        text += f": {', '.join(setting.choices)}"
    if setting.is_switch and setting.default is True:
        left, text = (
            "  " + setting.flag.replace("--", "--no-", 1),
            f"{text} (on by default; this turns it off)",
        )
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
    given = parse_arguments(argv)
    # Accumulation depends on the number of processes that this command would start.
    for line in render_arguments(resolve(given, world_size=plan_launch(given).world_size)):
        sys.stdout.write(line + "\n")
