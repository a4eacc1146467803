"""Argparse for commands with their own flags; its errors become ours."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from rapidformer.errors import ConfigurationError


class HelpShownError(Exception):
    """Help was requested and printed: there is nothing left to do."""


class CommandParser(argparse.ArgumentParser):
    """Raises errors, with the usage, and never exits the process."""

    def add(self, names: str, value: str, text: str, **options: Any) -> None:
        """Add a flag: its names, its value (N is a number; none: a switch) and its meaning."""
        kinds: dict[str, Any] = {"metavar": value} if value else {"action": "store_true"}
        if value == "N":
            kinds["type"] = int
        self.add_argument(*names.split(), help=text, **kinds | options)

    def read_run(self, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """The command's own flags and those of the run that it is about; help if there are none."""
        if not argv:
            self.print_help()
            raise HelpShownError
        return self.parse_known_args(argv)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Accept --output_prefix for --output-prefix."""
        flags = ((word, *word.partition("=")) for word in args or ())
        spelt = [
            name.replace("_", "-") + equals + value if word.startswith("--") else word
            for word, name, equals, value in flags
        ]
        return super().parse_known_args(spelt, namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}\n{self.format_usage().rstrip()}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise HelpShownError


def say(text: str) -> None:
    """Print a line for the user, beside the command's output."""
    print(text, file=sys.stderr, flush=True)
