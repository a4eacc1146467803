"""Settings: sections of typed fields, read from flags, YAML and code; without torch."""

from rapidformer.config.derive import resolve
from rapidformer.config.parse import arguments_from_mapping, build_parser, parse_arguments
from rapidformer.config.schema import Setting, get_settings
from rapidformer.config.settings import Settings

__all__ = [
    "Setting", "Settings", "arguments_from_mapping", "build_parser", "get_settings",
    "parse_arguments", "resolve",
]  # fmt: skip
