"""Settings as YAML that ``--config`` reads back, each line with the origin of its value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rapidformer.config.schema import get_settings
from rapidformer.config.settings import Settings

# Derived from the number of ranks or from other settings, so derived again on the next launch.
_PER_LAUNCH = frozenset(
    {
        "eval_micro_batch_size",
        "global_batch_size",
        "gradient_accumulation_steps",
        "load",
        "local_rank",
        "micro_batch_size",
        "save",
    }
)


def render_arguments(args: Settings) -> Iterator[str]:
    """One line per setting, in the order of the sections."""
    for section, settings in groupby(get_settings().values(), key=lambda setting: setting.section):
        yield f"# {section}"
        for setting in settings:
            value = getattr(args, setting.name)
            if setting.name == "save" and args.keeps_nothing:
                value = "none"
            text = f"{setting.name}: {_render(value)}"
            source = args.sources.get(setting.name, "default")
            is_shown_only = setting.name in _PER_LAUNCH and source.startswith("derived")
            yield f"{'# ' if is_shown_only else ''}{text:<60} # {source}"


def _render(value: Any) -> str:
    """On one line, even for multi-line text: JSON's lists and strings are valid YAML."""
    import yaml

    if isinstance(value, list) or (isinstance(value, str) and "\n" in value):
        return json.dumps(value, ensure_ascii=False)
    return str(yaml.safe_dump(value, allow_unicode=True, width=float("inf"))).splitlines()[0]
