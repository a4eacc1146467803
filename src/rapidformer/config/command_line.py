"""Which part of a process's command line is meant for us, read once.

A script that ``rapidformer`` or ``torchrun`` started is given our flags, and so is one whose
command line has at least one of them: then every flag must be known. Any other command line (a
notebook's, a script's with flags of its own) is left alone, and settings have their defaults.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rapidformer.config.parse import (
    FLAGS_VARIABLE,
    ExtraArgumentsProvider,
    build_parser,
    list_flags,
    parse_words,
)
from rapidformer.config.settings import Settings
from rapidformer.context import is_started
from rapidformer.log import get_logger
from rapidformer.nearest import find_nearest

_LAUNCHERS = (FLAGS_VARIABLE, "TORCHELASTIC_RUN_ID")
"""What `rapidformer launch` and torchrun leave in the environment."""
_KERNELS = ("ipykernel_launcher", "colab_kernel_launcher")


def read_command_line(extra_args_provider: ExtraArgumentsProvider | None = None) -> Settings:
    """The settings of this process, from its command line if that is meant for us."""
    words = sys.argv[1:]
    parser = build_parser(extra_args_provider)
    known = list_flags(parser)
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    has_ours = any(flag in known or flag.replace("_", "-") in known for flag in flags)
    if _is_notebook(sys.argv) or not (has_ours or _is_started()):
        _warn_about_near_misses(flags, known)
        words = []
    return parse_words(parser, words)


def _is_started() -> bool:
    return is_started() or any(name in os.environ for name in _LAUNCHERS)


def _is_notebook(argv: Sequence[str]) -> bool:
    return bool(argv) and Path(argv[0]).stem in _KERNELS


def _warn_about_near_misses(flags: Sequence[str], known: Sequence[str]) -> None:
    """One mistyped flag of ours must not pass for a script's own."""
    for flag in flags:
        near = find_nearest(flag, known)
        if near is not None:
            get_logger().warning(
                f"{flag} is not read, since it is no setting of rapidformer: did you mean {near}?"
            )
