"""``rapidformer launch [flags] SCRIPT [the script's flags]``: run any script in every process.

Flags before the script are for the launcher; those after it are passed to the script unchanged.
Launch flags after the script are obeyed too, since a script of ours would silently accept them.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from rapidformer.config import Settings, get_settings, parse_arguments
from rapidformer.config.parse import FLAGS_VARIABLE
from rapidformer.config.validate import find_problems
from rapidformer.errors import ConfigurationError
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
        _show_help()
        return
    from rapidformer.cli.train import run_script

    _, script, rest = split_words(argv)
    run_script(script, rest)


def wants_help(words: list[str]) -> bool:
    return not words or words[0] in ("--help", "-h")


def split_words(words: list[str]) -> tuple[list[str], str, list[str]]:
    """The launcher's flags, the script, and the script's arguments."""
    known = _get_flags()
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
    own, _, rest = split_words(words)
    args = parse_arguments([*_find_launch_flags(rest), *own])
    problems = find_problems(args)
    if problems:
        raise ConfigurationError(problems)
    os.environ[FLAGS_VARIABLE] = f"{os.environ.get(FLAGS_VARIABLE, '')} {shlex.join(own)}".strip()
    return args


def _get_flags() -> set[str]:
    launch = {name for name, setting in get_settings().items() if setting.section == "Launch"}
    return _spell(launch | {"config"})


def _spell(names: set[str]) -> set[str]:
    """The flags of these settings, with other systems' names for them."""
    aliases = get_foreign_flags().aliases
    spelt = names | {alias for alias, name in aliases.items() if name in names}
    return {"--" + name.replace("_", "-") for name in spelt}


def _find_launch_flags(rest: list[str]) -> list[str]:
    """Launch flags among the script's, if their values are valid for them.

    ``--save`` too: the ranks' logs are written there.
    """
    known = (_get_flags() - {"--config"}) | _spell({"save"})
    flags: list[str] = []
    for index, word in enumerate(rest):
        name, equals, value = word.partition("=")
        if _dashed(name) not in known:
            continue
        if not equals and index + 1 < len(rest):
            value = rest[index + 1]
        setting = get_settings()[_get_name(name)]
        if value.startswith("--"):
            continue
        try:
            values = get_foreign_flags().values.get(setting.name, {})
            setting.convert(values.get(value.lower(), value))
        except ValueError:
            continue  # one of the script's own flags, such as --device cuda:1
        flags += [_dashed(name), value]
    return flags


def _get_name(flag: str) -> str:
    name = flag.lstrip("-").replace("-", "_")
    return get_foreign_flags().aliases.get(name, name)


def _dashed(name: str) -> str:
    return name[:2] + name[2:].replace("_", "-")


def _show_help() -> None:
    from rapidformer.cli.help import format_setting

    sys.stdout.write(_USAGE)
    for name, setting in get_settings().items():
        if setting.section == "Launch" or name == "config":
            sys.stdout.write(format_setting(setting))
