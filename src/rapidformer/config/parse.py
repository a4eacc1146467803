"""From a command line, a YAML file and defaults to ``Settings``.

Precedence: code or flag, then ``--config``, then defaults. Values are read as text and converted
here, not by argparse, so that every problem of a command line is reported at once.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rapidformer.config import reading
from rapidformer.config.schema import Setting, get_settings, to_flag
from rapidformer.config.settings import Settings
from rapidformer.config.task_names import read_task
from rapidformer.context import get_settings_of, is_started
from rapidformer.errors import ConfigurationError, raise_problems
from rapidformer.foreign_names import get_foreign_flags
from rapidformer.log import get_logger
from rapidformer.nearest import find_nearest

ExtraArgumentsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]

COMMAND_LINE = "command line"
# Flags put before those of any command line, which override them. `rapidformer launch` passes its
# own flags to a script's engine this way, since it cannot change the script's command line.
FLAGS_VARIABLE = "RAPIDFORMER_FLAGS"
_LAUNCHERS = (FLAGS_VARIABLE, "TORCHELASTIC_RUN_ID")
"""What `rapidformer launch` and torchrun leave in the environment."""
_KERNELS = ("ipykernel_launcher", "colab_kernel_launcher")
_NO_FOLDER: dict[str, dict[str, bool | str | None]] = {"save": {"none": None}}
"""``--save none`` saves nothing; without ``--save``, a run gets a default folder."""
_SHOWN_FLAGS = 4
"""Of those that begin as an unknown one does."""
_NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class Parser(argparse.ArgumentParser):
    """Raises errors, and never exits the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message)


def build_parser(
    extra_args_provider: ExtraArgumentsProvider | None = None,
) -> argparse.ArgumentParser:
    """A parser for every setting, other systems' names, and the user's own flags."""
    parser: argparse.ArgumentParser = Parser(
        prog="rapidformer", add_help=False, allow_abbrev=False, conflict_handler="resolve"
    )
    spellings: dict[str, list[str]] = {}
    foreign = get_foreign_flags()
    for alias, name in foreign.aliases.items():
        spellings.setdefault(name, []).append(to_flag(alias))
    for setting in get_settings().values():
        _add_setting(parser, setting, spellings.get(setting.name, []))
    for name, row in foreign.names.items():
        if row.outcome in ("ignored", "honoured"):
            flag = to_flag(name)
            parser.add_argument(flag, nargs="?", dest=name, default=argparse.SUPPRESS)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser) or parser
    return parser


def _add_setting(parser: argparse.ArgumentParser, setting: Setting, aliases: list[str]) -> None:
    options: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS}
    flags = (setting.flag, *aliases)
    # A switch, which may also take a value: `--mixed-precision` or `--mixed-precision fp16`.
    if setting.is_switch or ("auto" in setting.choices and setting.default is None):
        on, off = ("true", "false") if setting.is_switch else ("auto", None)
        parser.add_argument(*flags, nargs="?", const=on, **options)
        negations = [flag.replace("--", "--no-", 1) for flag in flags]
        parser.add_argument(*negations, action="store_const", const=off, **options)
    elif setting.is_list or setting.is_one_or_many:
        parser.add_argument(*flags, nargs="*", **options)
    else:
        parser.add_argument(*flags, nargs="?", const=[], **options)


def parse_arguments(
    argv: Sequence[str], extra_args_provider: ExtraArgumentsProvider | None = None
) -> Settings:
    """Read a command line; a single ConfigurationError lists all of its problems."""
    parser = _get_parser() if extra_args_provider is None else build_parser(extra_args_provider)
    return parse_words(parser, argv)


@functools.cache
def _get_parser() -> argparse.ArgumentParser:
    """One to read with, not to change: it has 400 flags, and a command is read more than once."""
    return build_parser()


def parse_words(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Settings:
    """The same with a parser that is there already."""
    args, problems = _read_words(parser, argv)
    raise_problems(problems)
    return args


def _read_words(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[Settings, list[str]]:
    """The settings that can be read, and what is wrong with the others."""
    known = parser._option_string_actions
    problems: list[str] = []
    inherited = os.environ.get(FLAGS_VARIABLE, "")
    words = [*reading.split_words(inherited, problems, FLAGS_VARIABLE), *argv]
    foreign = get_foreign_flags()
    words, attributes = foreign.rewrite([_normalize(word, known) for word in words], problems)
    namespace, unknown = parser.parse_known_args(_join_negative_numbers(words, known))
    problems += [_describe_unknown(word, known) for word in unknown if word.startswith("-")]
    if not problems and unknown:
        problems = [
            f"unexpected {' '.join(unknown)!r}: put the setting's --name in front of each value"
        ]
    flags, settings = vars(namespace), get_settings()
    # An empty list: argparse would report one flag without its value, in its own words.
    bare = [settings[name] for name in flags if name in settings and flags[name] == []]
    for setting in bare:
        choices = f" (one of {', '.join(setting.choices)})" if setting.choices else ""
        problems.append(f"{setting.flag} needs a value{choices}.")
        del flags[setting.name]
    for name, tasks in foreign.tasks.items():
        if flags.get(name) in tasks:
            flags.setdefault("task", tasks[flags[name]])
    file = flags.get("config")
    layers = [(f"{file}", _read_yaml(file, problems)), (COMMAND_LINE, flags)]
    typed = {known[w].dest: w for w in (word.partition("=")[0] for word in words) if w in known}
    return _build_settings(layers, problems, attributes, typed), problems


def arguments_from_mapping(values: Mapping[str, Any], source: str = "code") -> Settings:
    """Settings given by name, ours or another system's, checked like flags."""
    problems: list[str] = []
    layer = _canonical_names(values, source, problems)
    args = _build_settings([(source, layer)], problems, {}, {})
    raise_problems(problems)
    return args


def _build_settings(
    layers: list[tuple[str, dict[str, Any]]],
    problems: list[str],
    attributes: Mapping[str, Any],
    typed: Mapping[str, str],
) -> Settings:
    """Convert the layers of values; a later layer overrides an earlier one.

    A value that cannot be read is left out, and ``typed`` has the flag that named it.
    """
    settings, other_words = get_settings(), {**_NO_FOLDER, **get_foreign_flags().values}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    extras = dict(attributes)
    for source, layer in layers:
        for name, raw in layer.items():
            if name not in settings:
                extras[name] = raw
                continue
            setting = settings[name]
            if raw is None and (setting.default is not None or source != COMMAND_LINE):
                continue  # `seed:` without a value means the default
            flag = typed.get(name, setting.flag)
            flag += f" ({setting.flag})" if flag != setting.flag else ""
            label = flag if source == COMMAND_LINE else f"{name} in {source}"
            try:
                values[name] = setting.convert(other_words.get(name, {}).get(str(raw).lower(), raw))
            except ValueError as reason:
                problems.append(f"{label} {reason}.")
                continue
            sources[name] = source
    if values.get("task") is not None:
        word = values["task"]
        values["task"], loss = read_task(word)
        if loss is not None and (other := values.setdefault("loss", loss)) != loss:
            problems.append(
                f"--task {word} is --task {values['task']} --loss {loss}, and --loss {other} was "
                f"given too: use --task {values['task']} --loss {other}, or leave --loss out."
            )
        if loss is not None:
            sources.setdefault("loss", sources["task"])
    return Settings(**values, extras=extras, sources=sources)


def read_command_line(extra_args_provider: ExtraArgumentsProvider | None = None) -> Settings:
    """The settings of this process, from its command line if that is meant for us.

    A script that ``rapidformer`` or ``torchrun`` started is given our flags, and so is one whose
    command line has at least one of them: then every flag must be known. Any other command line (a
    notebook's, a script's with flags of its own) is left alone, and settings have their defaults.
    """
    words = sys.argv[1:]
    if extra_args_provider is None and (args := get_settings_of(words)) is not None:
        return args
    parser = _get_parser() if extra_args_provider is None else build_parser(extra_args_provider)
    known = parser._option_string_actions
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    has_ours = any(flag in known or flag.replace("_", "-") in known for flag in flags)
    was_started = is_started() or any(name in os.environ for name in _LAUNCHERS)
    is_notebook = Path((sys.argv or [""])[0]).stem in _KERNELS
    if is_notebook or not (has_ours or was_started):
        for flag in flags:
            # One mistyped flag of ours must not pass for a script's own.
            if (near := find_nearest(flag, known)) is not None:
                get_logger().warning(
                    f"{flag} is not read, since it is no setting of rapidformer: did you mean "
                    f"{near}?"
                )
        words = []
    return parse_words(parser, words)


@dataclass(frozen=True)
class CommandLine:
    """A command's flags, read once."""

    words: list[str]
    args: Settings
    """The settings among them."""
    problems: list[str]
    """One for each flag that is no setting, which a script may define, and each unread value."""

    def find_unread(self) -> set[str]:
        """The flags whose values could not be read."""
        known = _get_parser()._option_string_actions
        starts = {problem.split()[0] for problem in self.problems}
        return {to_flag(known[word].dest) for word in starts if word in known}


def read_flags(words: Sequence[str]) -> CommandLine:
    """The settings among flags of which some may be a script's own."""
    known = _get_parser()._option_string_actions
    kept: list[str] = []
    problems: list[str] = []
    is_known = True
    # By position: a value may occur twice.
    for word in (_normalize(word, known) for word in words):
        if word.startswith("--"):
            is_known = word.partition("=")[0] in known
            if not is_known:
                problems.append(_describe_unknown(word, known))
        if is_known:
            kept.append(word)
    args, unread = _read_words(_get_parser(), kept)
    if args.user_script is not None:
        raise_problems(unread)
    return CommandLine(list(words), args, [*problems, *unread])


def _normalize(word: str, known: Mapping[str, Any]) -> str:
    """``--micro_batch_size`` means ``--micro-batch-size``, unless the user defined such a flag."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    dashed = "--" + name[2:].replace("_", "-")
    return word if name in known or dashed not in known else dashed + equals + value


def _join_negative_numbers(words: list[str], known: Mapping[str, Any]) -> list[str]:
    """``--lr -1e-4`` as ``--lr=-1e-4``: argparse would take the number for a flag."""
    joined: list[str] = []
    for word in words:
        if _NEGATIVE_NUMBER.fullmatch(word) and joined and joined[-1] in known:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _describe_unknown(word: str, known: Mapping[str, Any]) -> str:
    name = word.partition("=")[0]
    row = get_foreign_flags().names.get(name.lstrip("-").replace("-", "_"))
    if row is not None:
        return f"{name} is not supported: {row.note}."
    near = find_nearest(name, known)
    if family := [flag for flag in known if flag.startswith(f"{name}-")][:_SHOWN_FLAGS]:
        near = f"one of {', '.join(family)}" if len(family) > 1 else family[0]
    hint = f"did you mean {near}?" if near else "`rapidformer --help all` lists all flags."
    return f"unknown flag {name}: {hint}"


def _read_yaml(path: Any, problems: list[str]) -> dict[str, Any]:
    if path is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(reading.read_settings_text(str(path), "--config")) or {}
    except ConfigurationError as error:
        problems += error.problems
    # A number of thousands of digits is a ValueError, and a thousand brackets a RecursionError.
    except (yaml.YAMLError, ValueError, RecursionError) as reason:
        problems.append(f"--config {path} is not valid YAML: {' '.join(str(reason).split())}")
    else:
        if isinstance(content, dict) and not reading.is_expanding(content):
            translated = get_foreign_flags().read_file(content, path, problems)
            return _canonical_names(translated, path, problems)
        problems.append(f"--config {path} must contain `name: value` lines.")
    return {}


def _canonical_names(values: Mapping[str, Any], where: str, problems: list[str]) -> dict[str, Any]:
    settings, foreign = get_settings(), get_foreign_flags()
    canonical: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        name = foreign.aliases.get(name, name)
        if name in settings:
            canonical[name] = value
        elif name.startswith("no_") and name[3:] in settings:
            canonical[name[3:]] = not value
        elif name in foreign.names and foreign.names[name].outcome == "ignored":
            canonical[name] = value
        else:
            near = find_nearest(name, [*settings, *foreign.aliases])
            hint = f": did you mean {near}?" if near else "."
            problems.append(f"unknown setting {key} in {where}{hint}")
    return canonical
