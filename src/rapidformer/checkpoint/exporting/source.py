"""What ``rapidformer export`` was given: a run, one of its checkpoints, a model or an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.finding import find_checkpoint, read_arguments, read_run
from rapidformer.checkpoint.loading import choose_complete
from rapidformer.checkpoint.saving import ADAPTER, read_origin
from rapidformer.errors import CheckpointError, ConfigurationError, ModelError
from rapidformer.models.adapter_folder import fetch_adapter, is_adapter_folder, read_base
from rapidformer.models.location import DESCRIPTION, find_model_folder, is_checkpoint_model


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the trained weights are, and what is known about them."""

    folder: Path
    """A checkpoint, or a folder with a model or an adapter."""
    description: Path
    """The folder with the configuration and the tokenizer."""
    adapter: Path | None
    """The folder with the configuration of the adapter, if there is one."""
    base: str | None
    """The model under the adapter, if its weights are not in ``folder``."""
    start: str | None
    """The model that training started from, if it is known."""
    run: dict[str, Any] | None
    """A checkpoint's ``run.json``."""

    @property
    def is_checkpoint(self) -> bool:
        return self.run is not None

    def describe(self) -> str:
        """The folder, and the step of a checkpoint."""
        return f"{self.folder}" + (f" (step {self.run['step']})" if self.run else "")


def find_source(given: str | Path, base: str | None = None) -> Source:
    """Of a run, the best model, else the last, else the newest checkpoint; ``base``: its origin."""
    folder = Path(given).expanduser()
    if is_checkpoint_model(folder):
        folder = folder.parent
    if not folder.is_dir():
        fetched = fetch_adapter(str(given), None)
        if fetched is None:
            raise ConfigurationError(
                f"{given}: no such folder. export takes a run, a checkpoint, a model or an adapter "
                "on this machine, or an adapter on the Hub."
            )
        folder = Path(fetched)
    if (model := find_model_folder(folder)) is not None:
        is_adapter = is_adapter_folder(model)
        under = (base or read_base(model)) if is_adapter else None
        return Source(
            folder=model, description=model, adapter=model if is_adapter else None,
            base=under, start=under or base or _find_start(model), run=None,
        )  # fmt: skip
    if find_checkpoint(folder) is None:
        raise ModelError(
            f"{given} has no model (no config.json, best, last or iter_… folder): give the folder "
            "of a run, or one of its models or checkpoints."
        )
    return _describe_checkpoint(choose_complete(folder), base)


def _describe_checkpoint(folder: Path, base: str | None) -> Source:
    run, description = read_run(folder), folder / DESCRIPTION
    if not (description / "config.json").is_file():
        raise CheckpointError(
            f"{folder} does not describe its model, since that is not a model of transformers: "
            "load the checkpoint in the script that trained it, and call engine.export."
        )
    has_adapter = (description / ADAPTER).is_dir()
    if "base" in run and not has_adapter:
        raise CheckpointError(
            f"{folder} holds an adapter but not its configuration: export best or last of the run."
        )
    under = (base or read_origin(description) or run["base"].get("name")) if "base" in run else None
    return Source(
        folder=folder, description=description, base=under, run=run,
        adapter=description / ADAPTER if has_adapter else None,
        start=under or base or read_origin(description) or _find_start(folder),
    )  # fmt: skip


def _find_start(folder: Path) -> str | None:
    """The model whose weights the run started from, absolute or as it was given."""
    for place in (folder.parent, folder):
        arguments = read_arguments(place)
        if arguments.get("from_scratch"):
            return None
        checkpoint = find_checkpoint(place) if place.is_dir() else None
        known = read_origin(checkpoint / DESCRIPTION) if checkpoint else None
        known = known or arguments.get("pretrained_model_name_or_path")
        if known:
            return str(known)
    return None
