"""Settings as YAML that ``--config`` reads back, each line with the origin of its value."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rapidformer.config.arguments import TrainingArguments
from rapidformer.config.schema import get_settings


def render_arguments(args: TrainingArguments) -> Iterator[str]:
    """One line a setting, in the order of the sections."""
    import yaml

    for section, settings in groupby(get_settings().values(), key=lambda setting: setting.section):
        yield f"# {section}"
        for setting in settings:
            value = yaml.safe_dump(getattr(args, setting.name), default_flow_style=True, width=1000)
            text = f"{setting.name}: {value.splitlines()[0]}"
            yield f"{text:<60} # {args.sources.get(setting.name, 'default')}"
