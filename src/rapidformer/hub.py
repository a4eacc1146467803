"""The Hugging Face Hub: recognise its names, and whether it answers; without it, lookups retry."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from rapidformer.errors import list_first
from rapidformer.nearest import find_nearest

_SECONDS = 4.0
# Every tokenizer has a file whose name contains one of these.
_TOKENIZER_PARTS = (
    "tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tiktoken", "tekken", ".bpe",
)  # fmt: skip


def is_hub_reachable(*switches: str) -> bool:
    """Whether the Hub answers, and neither ``HF_HUB_OFFLINE`` nor a switch forbids to ask it."""
    variables = (os.environ.get(name, "").lower() for name in ("HF_HUB_OFFLINE", *switches))
    if any(value in {"1", "true", "yes", "on"} for value in variables):
        return False
    import urllib.request  # slow to import, and every command imports this file

    return bool(urllib.request.getproxies()) or _opens_connection()


def looks_like_path(text: str) -> bool:
    """Whether a text can only be a local path: Hub names are `name` or `owner/name`."""
    is_name = text.count("/") < 2 and "\\" not in text and not text.endswith("/")
    return not is_name or text.startswith((".", "/", "~"))


def is_hub_name(text: str) -> bool:
    """Whether a text is a name such as ``org/model``, and not a path in a folder that exists."""
    return text.count("/") == 1 and not looks_like_path(text) and not Path(text).parent.is_dir()


def is_missing_folder(text: str) -> bool:
    """Whether a text must be a local folder, since no name on the Hub is like it, and is none."""
    is_path = looks_like_path(text) or ("/" in text and Path(text).parent.is_dir())
    return is_path and not Path(text).expanduser().exists()


def list_names(folder: Path) -> list[str]:
    return sorted(child.name for child in folder.iterdir())


def has_tokenizer(folder: Path) -> bool:
    """Whether a local folder has a file of a tokenizer."""
    return any(part in name for name in list_names(folder) for part in _TOKENIZER_PARTS)


def describe_content(folder: Path) -> str:
    """The first few entries of a folder."""
    return list_first(list_names(folder), 8) or "nothing"


def describe_absence(what: str, name: str, flag: str, *, is_reachable: bool) -> str:
    """Why a name leads nowhere: it is no local folder, and not on the Hub as far as one can see."""
    if is_reachable:
        return (
            f"The {what} is neither a local file or folder nor on the Hugging Face Hub (or it is "
            f"private): check the spelling of {flag}.{suggest_path(Path(name))}"
        )
    return (
        f"The {what} is neither a local file or folder nor in the local cache, and the Hugging "
        "Face Hub cannot be reached: check the spelling or the network, or give a local one with "
        f"{flag}.{suggest_path(Path(name))}"
    )


def suggest_path(missing: Path) -> str:
    """A sentence with the nearest name next to a missing path, or nothing."""
    if not missing.parent.is_dir():
        return ""
    near = find_nearest(missing.name, list_names(missing.parent))
    return f" Did you mean {missing.parent / near}?" if near else ""


@functools.cache
def _opens_connection() -> bool:
    endpoint = urllib.parse.urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    opened: list[bool] = []

    def connect() -> None:
        with contextlib.suppress(OSError):
            socket.create_connection((endpoint.hostname or "", port), timeout=_SECONDS).close()
            opened.append(True)

    # In a thread, because the name lookup has no timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return bool(opened)


@contextlib.contextmanager
def quiet_transformers(location: str | None) -> Iterator[None]:
    """Silence transformers' report and bar, except for downloads: our own lines say it."""
    from transformers.utils import logging

    level, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if location is None or Path(location).exists():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()
