"""The settings as data: flags, YAML keys, help and docs are generated from here."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import os
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rapidformer.config.settings import Settings

_BOOLS = {"true": True, "yes": True, "on": True, "1": True}
_BOOLS |= {"false": False, "no": False, "off": False, "0": False}
_PATHS = frozenset({
    "cache_dir", "config", "data_cache_path", "data_dir", "data_path", "deepspeed", "hostfile",
    "load", "log_dir", "merge_file", "output", "peft_config", "pretrained_model_name_or_path",
    "save", "tensorboard_dir", "test_data", "test_data_path", "tokenizer_model",
    "tokenizer_name_or_path", "train_data", "train_data_path", "user_script", "valid_data",
    "valid_data_path", "vocab_file",
})  # fmt: skip
# Derived from the number of ranks or from other settings, so derived again on the next launch.
_PER_LAUNCH = frozenset({
    "eval_micro_batch_size", "global_batch_size", "gradient_accumulation_steps", "load",
    "local_rank", "micro_batch_size", "save",
})  # fmt: skip


def to_flag(name: str) -> str:
    """A setting's name as a command-line flag."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting that a user can give."""

    name: str
    section: str
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    is_list: bool = False
    is_one_or_many: bool = False
    takes_fraction: bool = False
    """Whether a fraction is accepted where a whole number is usual."""
    tasks: tuple[str, ...] = ()
    """The tasks that read it; empty if it is not for particular tasks."""

    @property
    def flag(self) -> str:
        return to_flag(self.name)

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    def convert(self, value: Any) -> Any:
        """Convert a value to this setting's type; a ValueError has the reason, without the flag."""
        if value is None:
            return None
        if self.is_one_or_many:
            items = value if isinstance(value, list) else [value]
            values = [self._to_text(item) for item in items]
            return values[0] if len(values) == 1 else values
        if self.is_list:
            if not isinstance(value, (list, tuple)):
                value = [part.strip() for part in str(value).split(",")]
            return [self._convert_one(item) for item in value]
        if isinstance(value, list):
            if len(value) != 1:
                raise ValueError(f"takes one value, got {len(value)}: {' '.join(map(str, value))}")
            value = value[0]
        return self._convert_one(value)

    def _convert_one(self, value: Any) -> Any:
        if self.kind is bool:
            if (text := str(value).lower()) in _BOOLS:
                return _BOOLS[text]
            raise ValueError(f"is a switch and takes true or false, got {value!r}")
        if self.choices:
            return self._to_choice(value)
        # Whole numbers stay integers, also where a fraction may be: scripts say range(args.epochs).
        is_fraction = self.takes_fraction and not _to_float(value).is_integer()
        if self.kind is int and not is_fraction:
            return _to_int(value)
        if self.kind is float or is_fraction:
            return _to_float(value)
        return self._to_text(value)

    def _to_text(self, value: Any) -> str:
        text = str(value)
        if text.startswith("~") and "/" in text:
            # As a shell would, which does not see YAML files and `--save=~/runs`. Not with
            # Path.expanduser: it fails for an unknown user, and drops a trailing slash.
            text = os.path.expanduser(text)  # noqa: PTH111
        if "\0" in text:
            raise ValueError("contains a zero byte")
        if self.name in _PATHS and not text.lstrip().startswith("{"):
            longest = max(len(part.encode(errors="replace")) for part in text.split("/"))
            if longest > 255 or len(text) > 4095:
                raise ValueError(
                    f"is too long for a file name: {text[:30]}... ({len(text)} characters)"
                )
        return text

    def _to_choice(self, value: Any) -> str | None:
        # A switch with a choice of values (`--mixed-precision`) can also be given as true or false.
        if isinstance(value, bool) and "auto" in self.choices:
            return "auto" if value else None
        text = str(value)
        for choice in self.choices:
            if text.lower().replace("_", "-") == choice.lower().replace("_", "-"):
                return choice
        raise ValueError(f"must be one of {', '.join(self.choices)}, got {text!r}")


def _to_int(value: Any) -> int:
    text = str(value).replace("_", "")
    try:
        if not float(text).is_integer():
            raise ValueError
    except ValueError:  # also for True
        raise ValueError(f"needs a whole number, got {value!r}") from None
    # A large seed must not pass through a float.
    return int(text) if text.lstrip("+-").isdigit() else int(float(text))


def _to_float(value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except OverflowError:
        raise ValueError("needs a number that fits into 64 bits") from None
    except (TypeError, ValueError):
        raise ValueError(f"needs a number, got {value!r}") from None


@functools.cache
def get_settings() -> dict[str, Setting]:
    """Every setting by name, in the order in which the sections list them."""
    docstrings = _read_field_docstrings()
    settings: dict[str, Setting] = {}
    for section in Settings.__bases__:
        hints = typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            text = docstrings[section.__name__, field.name]
            settings[field.name] = _build_setting(field, section, hints[field.name], text)
    return settings


def _build_setting(field: dataclasses.Field[Any], section: type, hint: Any, text: str) -> Setting:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if is_union else (hint,)
    alternatives = [part for part in parts if part is not type(None)]
    is_list = all(typing.get_origin(part) is list for part in alternatives)
    takes_fraction = alternatives == [int, float]
    first = typing.get_args(alternatives[0])[0] if is_list else alternatives[0]
    choices: tuple[str, ...] = ()
    if typing.get_origin(first) is Literal:
        choices, first = typing.get_args(first), str
    tasks = field.metadata.get("tasks", ())
    prefix = f"{', '.join(tasks)}: " if tasks else ""
    return Setting(
        name=field.name, section=section.__doc__ or "", kind=first, default=field.default,
        help=prefix + " ".join(text.split()), choices=choices, tasks=tasks, is_list=is_list,
        is_one_or_many=len(alternatives) > 1 and not takes_fraction, takes_fraction=takes_fraction,
    )  # fmt: skip


def _read_field_docstrings() -> dict[tuple[str, str], str]:
    """The string under each field: Python discards it, so it is read from the source."""
    modules = {section.__module__ for section in Settings.__bases__}
    sources = [inspect.getsource(sys.modules[module]) for module in modules]
    return {
        (node.name, ast.unparse(field.target)): ast.literal_eval(text.value)
        for source in sources
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
        for field, text in itertools.pairwise(node.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def render_arguments(args: Settings) -> Iterator[str]:
    """As YAML that ``--config`` reads back: one line per setting, with the origin of its value."""
    section = ""
    for setting in get_settings().values():
        if setting.section != section:
            section = setting.section
            yield f"# {section}"
        value = getattr(args, setting.name)
        if setting.name == "save" and args.keeps_nothing:
            value = "none"
        source = args.sources.get(setting.name, "default")
        is_shown_only = setting.name in _PER_LAUNCH and source.startswith("derived")
        line = f"{setting.name}: {_render(value)}"
        yield f"{'# ' if is_shown_only else ''}{line:<60} # {source}"


def _render(value: Any) -> str:
    """On one line, even for multi-line text: JSON's lists and strings are valid YAML."""
    import yaml

    if isinstance(value, list) or (isinstance(value, str) and "\n" in value):
        return json.dumps(value, ensure_ascii=False)
    return str(yaml.safe_dump(value, allow_unicode=True, width=float("inf"))).splitlines()[0]
