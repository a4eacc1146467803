"""Push an export to the Hub as one commit, and read back what arrived."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils.sha import git_hash

from rapidformer.checkpoint.exporting.files import REPORT, list_files
from rapidformer.errors import CheckpointError, ConfigurationError
from rapidformer.log import get_logger

# Of an earlier model: from_pretrained would load an old model.safetensors instead of new shards.
_REPLACED = ["model*.safetensors", "model.safetensors.index.json", "adapter_*", "pytorch_model*"]


@dataclass(frozen=True)
class Hub:
    """A repository that may be written to."""

    api: Any
    name: str
    private: bool


def open_hub(name: str, *, private: bool) -> Hub:
    """Check the name, the login and the repository before anything slow begins."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    if name.count("/") != 1:
        raise ConfigurationError(f"--push {name}: give it as organization/name or user/name.")
    api = HfApi(library_name="rapidformer")
    try:
        api.whoami()
    except Exception as reason:  # no token, a wrong one, or no network: each of another class
        raise ConfigurationError(
            f"--push {name}: the Hub does not know you ({_shorten(reason)}). Log in with `hf auth "
            "login`, or set HF_TOKEN to a token that may write."
        ) from None
    try:
        found = api.repo_info(name)
    except HFValidationError as reason:
        raise ConfigurationError(f"--push {name}: {reason}") from None
    except RepositoryNotFoundError:
        return Hub(api, name, private)
    except Exception as reason:  # the network, rights: each of another class
        raise ConfigurationError(
            f"--push {name}: the Hub does not show the repository ({_shorten(reason)})."
        ) from None
    if private and not found.private:
        raise ConfigurationError(
            f"--push {name} --private: the repository exists and is public. Make it private on "
            "its page, or choose another name."
        )
    return Hub(api, name, private)


def push_folder(hub: Hub, folder: Path) -> None:
    """One commit with the whole folder, then a comparison with what the Hub has."""
    # Not the report, which names folders of this machine.
    files = sorted(name for name in list_files(folder) if name != REPORT)
    replaced = _REPLACED if any(folder.glob("*.safetensors")) else None
    try:
        # None, not False: an organization may make its repositories private by itself.
        hub.api.create_repo(hub.name, private=hub.private or None, exist_ok=True)
        commit = hub.api.upload_folder(
            repo_id=hub.name, folder_path=folder, ignore_patterns=REPORT,
            delete_patterns=replaced, commit_message=f"Export of {folder.name} by rapidformer",
        )  # fmt: skip
        there = hub.api.get_paths_info(hub.name, files, revision=commit.oid)
    except Exception as reason:  # the network, rights, quotas: each of another class
        options = f"--exclude {REPORT}" + " --private" * hub.private
        raise CheckpointError(
            f"--push {hub.name} failed: {_shorten(reason)}. The export is in {folder}: push it "
            f"with `hf upload {hub.name} {folder} {options}`."
        ) from None
    arrived = {file.path: file for file in there}
    wrong = [name for name in files if not _is_same(folder / name, arrived.get(name))]
    if wrong:
        raise CheckpointError(
            f"--push {hub.name}: {', '.join(wrong[:3])} on the Hub is not what is in {folder}."
        )
    say = get_logger().info
    say("pushed    %d files in one commit, and read back: %s", len(files), commit.commit_url)


def _is_same(path: Path, there: Any) -> bool:
    """Whether a file is what the Hub has, by the hash that the Hub knows it by."""
    if there is None or there.size != path.stat().st_size:
        return False
    with path.open("rb") as file:
        if there.lfs is not None:
            return bool(hashlib.file_digest(file, "sha256").hexdigest() == there.lfs.sha256)
        return bool(git_hash(file.read()) == there.blob_id)


def _shorten(reason: Exception) -> str:
    return (str(reason).strip().splitlines() or [type(reason).__name__])[0].rstrip(".")
