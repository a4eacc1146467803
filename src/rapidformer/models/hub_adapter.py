"""An adapter on the Hugging Face Hub: downloaded, and from then on a folder like any other."""

from __future__ import annotations

import functools

from rapidformer.errors import ModelError
from rapidformer.hub import is_hub_reachable, looks_like_path
from rapidformer.models.adapters import CONFIG_FILE

# Intermediate checkpoints in subfolders, and the state of other trainers.
_UNUSED = ["*/*", "optimizer*", "scheduler*", "rng_state*", "training_args.bin"]


@functools.cache
def fetch_adapter(name: str, cache_dir: str | None) -> str | None:
    """The local folder of an adapter on the Hub; None if there is no adapter of this name."""
    if looks_like_path(name):
        return None
    from huggingface_hub import hf_hub_download, snapshot_download

    is_offline = not is_hub_reachable()
    try:
        hf_hub_download(name, CONFIG_FILE, cache_dir=cache_dir, local_files_only=is_offline)
    except (OSError, ValueError):
        return None  # a model without adapters, or no such name: loading it will say which
    try:
        return snapshot_download(
            name, cache_dir=cache_dir, local_files_only=is_offline, ignore_patterns=_UNUSED
        )
    except (OSError, ValueError) as reason:
        text = " ".join(str(reason).split())[:300]
        raise ModelError(f"The adapter {name} cannot be downloaded: {text}") from None
