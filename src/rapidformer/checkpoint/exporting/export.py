"""``rapidformer.export``: write, compare and prove a model; OUT appears complete or not at all."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from rapidformer.checkpoint.exporting.build import (
    Recipes,
    build_model,
    build_recipes,
    find_stored_dtype,
)
from rapidformer.checkpoint.exporting.files import cast, copy_texts, write_shards
from rapidformer.checkpoint.exporting.proof import Changes, Proof, count_changes, prove
from rapidformer.checkpoint.exporting.source import Source, find_source
from rapidformer.checkpoint.index import name_dtype
from rapidformer.checkpoint.lock import replacing
from rapidformer.checkpoint.publish import read_json
from rapidformer.errors import (
    CheckpointError,
    ConfigurationError,
    ModelError,
    RapidformerError,
    count,
)
from rapidformer.hub import quiet_transformers
from rapidformer.log import get_logger
from rapidformer.models.adapter_folder import save_adapter
from rapidformer.models.adapters import find_adapter
from rapidformer.models.configuration import read_config
from rapidformer.models.location import OwnCodeError
from rapidformer.models.quantizing import forget_quantization

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_REPORT = "export.json"
"""Lists what an export wrote: only such a folder is ever replaced."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was exported, and what is proven about it."""

    source: str
    folder: str
    dtype: str
    is_merged: bool
    changes: Changes | None
    """None if the starting model is unknown."""
    proof: Proof | None
    """None if it was not wanted."""


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    merge: bool = True,
    verify: bool = True,
    allow_unchanged: bool = False,
    base: str | None = None,
) -> Report:
    """Export a run, a checkpoint of any layout, a model or an adapter as a Hugging Face folder.

    An adapter is merged into the weights under it; with ``merge=False`` it is exported by itself.
    The folder is loaded by plain transformers and compared with the trained model before it gets
    its name, unless ``verify`` is False. ``base`` is the model that training started from, if the
    run does not know it.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigurationError(f"dtype {dtype!r} is unknown: use {', '.join(DTYPES)}.")
    target = Path(out).expanduser()
    _refuse_foreign(target)
    source = find_source(checkpoint, base)
    say = get_logger().info
    with _staging(target) as staging:
        try:
            config = read_config(str(source.description), local_files_only=True)
        except OwnCodeError:
            raise ModelError(
                f"{source.folder} comes with its own Python code, which export does not run: use "
                "engine.export in the script that trained it."
            ) from None
        if source.base is not None:
            forget_quantization(config, source.base, merges=merge)
        kind = DTYPES[dtype] if dtype else find_stored_dtype(source)
        kind_name = next((name for name, known in DTYPES.items() if known is kind), str(kind))
        say("source    %s", source.describe())

        def compare(recipes: Recipes) -> Changes | None:
            return count_changes(recipes, source, config, kind, allow_unchanged=allow_unchanged)

        if source.adapter is not None and not merge:
            what = "the adapter alone"
            changes = _write_adapter(source, config, staging, kind, compare)
        else:
            recipes = build_recipes(source, config, merges=source.adapter is not None)
            changes = compare(recipes)
            what = _write_model(recipes, staging, kind, max_shard_size)
            what += " (base model and adapter merged)" * (source.adapter is not None)
        copy_texts(source, staging)
        say("written   %s, %s%s", what, kind_name, "" if dtype else " as stored")
        proof = prove(source, config, staging, kind) if verify else None
        if not verify:
            say("verified  no (--no-verify): nothing says that this is the trained model")
        report = Report(
            source=str(source.folder), folder=str(target), dtype=kind_name,
            is_merged=source.adapter is not None and merge, changes=changes, proof=proof,
        )  # fmt: skip
        content = {**asdict(report), "files": sorted(_list_files(staging))}
        (staging / _REPORT).write_text(json.dumps(content, indent=1), encoding="utf-8")
    say("exported  %s", target)
    return report


def _write_model(
    recipes: Recipes, staging: Path, dtype: torch.dtype, max_shard_size: int | str
) -> str:
    try:
        files, size = write_shards(recipes, staging, dtype, max_shard_size)
    except ValueError as reason:
        raise ConfigurationError(f"max_shard_size {max_shard_size!r}: {reason}.") from None
    config = copy.deepcopy(recipes.config)
    config.dtype = name_dtype(dtype)
    with quiet_transformers(None):
        config.save_pretrained(staging)
    return f"{len(recipes.files)} tensors in {count(files, 'file')} ({size / 1e6:,.1f} MB)"


def _write_adapter(
    source: Source,
    config: Any,
    staging: Path,
    dtype: torch.dtype,
    compare: Callable[[Recipes], Changes | None],
) -> Changes | None:
    if source.base is None:
        raise ModelError(
            f"{source.folder}: the weights under the adapter are in no file, so nobody could load "
            "the adapter alone: export with --merge."
        )
    recipes = build_recipes(source, config, merges=False)
    model, adapter, changes = recipes.model, find_adapter(recipes.model), None
    assert adapter is not None
    if adapter.is_prompt:
        # peft computes what it saves of learned tokens, and so needs their values.
        model = build_model(source, config)
    else:
        changes = compare(build_recipes(source, config, merges=True))
    trained = {
        name: cast(recipes.read(parameter), dtype)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    save_adapter(model, adapter, trained, staging)
    return changes


# ---- the folder ----------------------------------------------------------------------------------


def _refuse_foreign(target: Path) -> None:
    """Refuse a folder with anything in it that no export wrote."""
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"{target} is a file: choose a folder to export to.")
    if not target.is_dir() or not any(target.iterdir()):
        return
    ours = read_json(target / _REPORT, or_nothing=True).get("files")
    known = {_REPORT, *(ours if isinstance(ours, list) else ())}
    others = sorted(name for name in _list_files(target) if name not in known)
    if ours is None or others:
        shown = ", ".join(others[:3]) + (", ..." if others[3:] else "")
        raise ConfigurationError(
            f"{target} holds files that no export wrote ({shown}): choose another folder."
        )


def _list_files(folder: Path) -> Iterator[str]:
    return (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@contextlib.contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A folder to write to; if something fails, nothing is left of it, and the error says why."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(target) as staging:
            yield staging
    except RapidformerError:
        raise
    except (OSError, SafetensorError) as reason:
        text = getattr(reason, "strerror", None) or str(reason).rpartition("I/O error: ")[2]
        raise CheckpointError(
            f"{target} cannot be written: {text}. Nothing was exported."
        ) from None
