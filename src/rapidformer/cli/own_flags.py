"""What commands with flags of their own share: argparse whose errors are the project's own."""

from __future__ import annotations

import argparse
from typing import NoReturn

from rapidformer.errors import ConfigurationError


class HelpShownError(Exception):
    """Help was asked for and has been written: there is nothing left to do."""


class CommandParser(argparse.ArgumentParser):
    """Raises what is wrong, with the usage, and never ends the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}\n{self.format_usage().rstrip()}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise HelpShownError


def with_dashes(word: str) -> str:
    """--output_prefix is --output-prefix here too."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word
