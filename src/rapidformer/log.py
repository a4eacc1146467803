"""The library's logger, shown by rank 0; warnings of other ranks are marked with their rank."""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from typing import Any

_NAME = "rapidformer"


class ScriptLogger(logging.Logger):
    """A logger whose methods also take ``main_process_only=False``, and ``warning_once``."""

    @cache  # noqa: B019 - loggers live as long as the process
    def warning_once(self, message: object, *values: object, **options: Any) -> None:
        self.warning(message, *values, stacklevel=2, **options)

    def _log(  # type: ignore[override]
        self, level: int, msg: object, args: Any, *, main_process_only: bool = True, **options: Any
    ) -> None:
        options["extra"] = {"every_rank": not main_process_only, **(options.get("extra") or {})}
        options["stacklevel"] = options.get("stacklevel", 1) + 1
        super()._log(level, msg, args, **options)


def get_logger(name: str | None = None, log_level: str | None = None) -> logging.Logger:
    """The library's logger, or a child of it, with a level of its own if one is given."""
    before = logging.getLoggerClass()
    if name is None or name == _NAME:
        logger = logging.getLogger(_NAME)
    else:
        logging.setLoggerClass(ScriptLogger)
        try:
            logger = logging.getLogger(name if name.startswith(_NAME + ".") else f"{_NAME}.{name}")
        finally:
            logging.setLoggerClass(before)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return logger


def configure_logging(level: str = "info") -> None:
    """Send the library's messages to standard error, once, in one short format."""
    logger = logging.getLogger(_NAME)
    logger.setLevel(level.upper())
    if any(isinstance(handler, _Handler) for handler in logger.handlers):
        return
    logger.addHandler(_Handler())
    logger.propagate = False


def warn(message: str, *values: object) -> None:
    """Warn about what every rank finds (in data, model or settings); only rank 0 shows it."""
    get_logger().warning(message, *values, extra={"is_known_to_all": True})


@cache
def warn_once(message: str, *, is_local: bool = False) -> None:
    """Warn once per run; if ``is_local``, the problem may be this rank's alone: once per rank."""
    get_logger().warning(message, extra={"is_known_to_all": not is_local})


@cache
def say_once(message: str) -> None:
    """Log something minor once per process."""
    get_logger().info(message)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        # Looked up each time: tests and progress bars replace standard error.
        self.stream = sys.stderr
        is_known = getattr(record, "is_known_to_all", False)
        is_local = record.levelno >= logging.WARNING and not is_known
        if _get_rank() == 0 or is_local or getattr(record, "every_rank", False):
            super().emit(record)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        rank = f"[rank {_get_rank()}] " if _get_rank() else ""
        mark = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{rank}{mark}{text}"


def _get_rank() -> int:
    # Only a launcher that also sets LOCAL_RANK means processes; elsewhere RANK may be a node's.
    return int(os.environ.get("RANK", "0")) if "LOCAL_RANK" in os.environ else 0
