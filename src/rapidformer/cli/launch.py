"""``rapidformer launch [flags] SCRIPT [its flags]``, of which the launcher's are obeyed, too."""

from __future__ import annotations

import os
import shlex
import sys
from itertools import zip_longest
from pathlib import Path

from rapidformer.config import Settings, get_settings, parse_arguments
from rapidformer.config.parse import FLAGS_VARIABLE
from rapidformer.config.schema import to_flag
from rapidformer.config.validate import find_problems
from rapidformer.errors import ConfigurationError, raise_problems
from rapidformer.foreign_names import get_foreign_flags

_USAGE = """\
usage: rapidformer launch [flags] SCRIPT [the script's flags]

  rapidformer launch --nproc-per-node 2 train.py --lr 1e-4
  rapidformer launch --config cluster.yaml train.py
  rapidformer launch --hostfile hosts --max-restarts 3 train.py
  srun rapidformer launch train.py

"""


def run(argv: list[str]) -> None:
    """In a worker, or if one process is enough: run the script as ``python SCRIPT`` would."""
    if wants_help(argv):
        from rapidformer.cli.help import format_setting

        sys.stdout.write(_USAGE)
        for name, setting in get_settings().items():
            if setting.section == "Launch" or name == "config":
                sys.stdout.write(format_setting(setting))
        return
    from rapidformer.cli.train import run_script

    _, script, rest = split_words(argv)
    run_script(script, rest)


def wants_help(words: list[str]) -> bool:
    return not words or words[0] in ("--help", "-h")


def split_words(words: list[str]) -> tuple[list[str], str, list[str]]:
    """The launcher's flags, the script, and the script's arguments."""
    known = _spell_flags("config")
    position = 0
    while position < len(words) and words[position].startswith("-"):
        name, equals, _ = words[position].partition("=")
        if _dashed(name) not in known:
            raise ConfigurationError(
                f"{name} is not a flag of the launcher: put the script's flags after the script; "
                "`rapidformer launch --help` lists the launcher's flags."
            )
        position += 1 if equals else 2
    if position >= len(words):
        raise ConfigurationError("no script: use rapidformer launch [flags] SCRIPT [its flags].")
    script = words[position]
    if not Path(script).is_file():
        raise ConfigurationError(f"{script} is not a file: give the script's path.")
    return words[:position], script, words[position + 1 :]


def read_launch_settings(words: list[str]) -> Settings:
    """The launcher's settings; its flags are passed on to the script's engine."""
    flags, _, rest = split_words(words)
    args = parse_arguments([*_find_launch_flags(rest), *flags])
    problems = find_problems(args)
    raise_problems(problems)
    os.environ[FLAGS_VARIABLE] = f"{os.environ.get(FLAGS_VARIABLE, '')} {shlex.join(flags)}".strip()
    return args


def _spell_flags(other: str) -> dict[str, str]:
    """The settings of the launcher and another one by their flags, in other systems' words too."""
    aliases = get_foreign_flags().aliases
    settings = {name for name, one in get_settings().items() if one.section == "Launch"} | {other}
    spelt = {name: name for name in settings}
    spelt |= {alias: name for alias, name in aliases.items() if name in settings}
    return {to_flag(spelling): name for spelling, name in spelt.items()}


def _find_launch_flags(rest: list[str]) -> list[str]:
    """Launch flags (and ``--save``, for logs) among the script's, if their values are valid."""
    known = _spell_flags("save")
    flags: list[str] = []
    for word, after in zip_longest(rest, rest[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        flag, value = _dashed(flag), value if equals else after
        if flag not in known or value.startswith("--"):
            continue
        setting = get_settings()[known[flag]]
        try:
            values = get_foreign_flags().values.get(setting.name, {})
            setting.convert(values.get(value.lower(), value))
        except ValueError:
            continue  # one of the script's own flags, such as --device cuda:1
        flags += [flag, value]
    return flags


def _dashed(name: str) -> str:
    return name[:2] + name[2:].replace("_", "-")
