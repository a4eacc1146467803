"""Where a model is, whether its folder is complete, and why loading it failed.

`explain_failure` keeps transformers' tracebacks from users: every call to `from_pretrained` is made
inside it and inside `quiet_transformers`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rapidformer.config import Settings
from rapidformer.config.sections import CheckpointArguments
from rapidformer.config.task_sections import ModelArguments
from rapidformer.errors import ModelError, RapidformerError
from rapidformer.hub import (
    describe_absence,
    describe_content,
    has_tokenizer,
    is_hub_reachable,
    looks_like_path,
    suggest_path,
)
from rapidformer.models.adapter_folder import fetch_adapter, is_adapter_folder

_WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
DESCRIPTION = "model"
"""The folder in a checkpoint with its model's configuration and tokenizer."""
# What the class of a model says that it was trained for, by its ending.
_HEADS = (
    "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
    "ForMultipleChoice", "ForImageClassification", "ForAudioClassification", "ForCTC",
)  # fmt: skip
# Other endings of a task's models: wav2vec 2.0's classifiers have that of texts.
_OTHER_HEADS = {"ForAudioClassification": "ForSequenceClassification"}


def get_model_location(args: Settings) -> str | None:
    """Where to load the model from, --load first; an adapter on the Hub is downloaded here."""
    if args.load and is_model_folder(Path(args.load).expanduser()):
        return str(Path(args.load).expanduser())
    location = args.pretrained_model_name_or_path
    if location is None:
        return None
    path = Path(location).expanduser()
    if path.exists():
        return str(path)
    return fetch_adapter(str(location), args.cache_dir) or str(location)


def is_model_folder(folder: Path) -> bool:
    """Whether a folder holds a model, or an adapter that names its model."""
    return (folder / "config.json").is_file() or is_adapter_folder(folder)


def find_model_folder(folder: Path) -> Path | None:
    """The folder itself, or the best or last model of a run."""
    places = (folder, folder / "best", folder / "last")
    return next((place for place in places if is_model_folder(place)), None)


def is_checkpoint_model(location: str | Path) -> bool:
    """Whether a folder describes the model of a checkpoint, which has the weights next to it."""
    return Path(location).name == DESCRIPTION and (Path(location).parent / "run.json").is_file()


def loads_checkpoint(args: CheckpointArguments) -> bool:
    """Whether ``--load`` names a run or a checkpoint, which will replace all weights."""
    folder = Path(args.load or "").expanduser()
    return bool(args.load) and folder.is_dir() and not is_model_folder(folder)


def is_from_scratch(args: Settings) -> bool:
    """Whether weights are freshly initialised: requested, or only a model type was given."""
    return bool(args.from_scratch) or get_model_location(args) is None


def lacks_file(location: str, file: str) -> bool:
    """Whether a local folder lacks this file; for the Hub this is unknown."""
    path = Path(location)
    return path.is_dir() and not (path / file).is_file()


def check_folder(location: str, *, needed: str | None = None, needs_weights: bool = False) -> None:
    """Refuse a path that is not a model folder, or one that lacks a file; Hub names pass."""
    path = Path(location)
    if not path.exists():
        if looks_like_path(location):
            raise ModelError(f"There is no model folder {path}.{suggest_path(path)}")
        return
    if not path.is_dir():
        raise ModelError(f"{location} is a file: a model is a folder with config.json and weights.")
    if needed is not None and lacks_file(location, needed):
        raise ModelError(
            f"The model folder {location} lacks {needed}: it holds {describe_content(path)}. "
            "Choose another folder, or give --model-type and --from-scratch for fresh weights."
        )
    if is_checkpoint_model(path):
        return
    if needs_weights and not has_weights(path):
        raise ModelError(
            f"The model folder {location} lacks weights (model.safetensors or "
            f"pytorch_model.bin): it holds {describe_content(path)}. Add --from-scratch to start "
            "from fresh weights."
        )


def has_weights(folder: Path) -> bool:
    """Whether a local folder has a model's weights."""
    return any((folder / name).is_file() for name in _WEIGHT_FILES)


def check_has_tokenizer(location: str) -> None:
    """transformers makes an empty tokenizer for a folder without one, which knows no words."""
    path = Path(location)
    if path.is_dir() and not has_tokenizer(path):
        raise ModelError(
            f"The folder {location} lacks a tokenizer (tokenizer.json or vocab.txt): it holds "
            f"{describe_content(path)}. Save the tokenizer into it, or give --tokenizer-type and "
            "--vocab-file."
        )


def check_head(auto_class_name: str, architectures: Sequence[str] | None, location: str) -> None:
    """Refuse a model of another task, by its class: names of weights may be the same."""
    wanted = auto_class_name.removeprefix("AutoModel")
    if not wanted:
        return  # the trunk alone, which every model has
    saved = next(iter(architectures or ()), "")
    other = next((head for head in _HEADS if saved.endswith(head)), wanted)
    if other not in (wanted, _OTHER_HEADS.get(wanted)):
        raise ModelError(
            f"{location} was trained for another task: it is a {saved}, and this task needs a "
            f"model {wanted}. Choose the --task it was trained for, or pass --allow-untrained."
        )


def get_hub_options(location: str, args: ModelArguments) -> dict[str, Any]:
    """Passed to every `from_pretrained`."""
    is_local = Path(location).exists()
    return {
        "trust_remote_code": args.trust_remote_code,
        "cache_dir": args.cache_dir,
        "local_files_only": is_local or not is_hub_reachable(),
    }


class OwnCodeError(ModelError):
    """The model needs code from its own folder, and nobody has said that it may run."""


@contextlib.contextmanager
def explain_failure(location: str, wanted: str) -> Iterator[None]:
    """Turn what transformers raises for bad input into one sentence."""
    from safetensors import SafetensorError

    try:
        yield
    except (RapidformerError, MemoryError):
        raise
    except SafetensorError as error:
        raise ModelError(f"The weights in {location} are damaged: {error}.") from error
    except Exception as error:  # a damaged file can make transformers raise anything
        if "trust_remote_code" in str(error):
            raise OwnCodeError(
                f"{location} comes with its own Python code: add --trust-remote-code if you trust "
                "it."
            ) from error
        raise ModelError(_describe_failure(location, wanted, error)) from error


def _describe_failure(location: str, wanted: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    if "Unrecognized configuration class" in text:
        return (
            f"{location} cannot do this task: its architecture has no {wanted} in transformers; "
            "choose a model of another architecture."
        )
    if not Path(location).exists() and isinstance(error, OSError):
        is_reachable = is_hub_reachable()
        is_unknown = "not a valid model identifier" in text or "Repository Not Found" in text
        if is_unknown or not is_reachable:
            flag = "--pretrained-model-name-or-path"
            return describe_absence(f"model {location}", location, flag, is_reachable=is_reachable)
    return f"The {wanted} of {location} cannot be loaded: {text[:300] or type(error).__name__}"
