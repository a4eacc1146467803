"""``rapidformer.export``: write, compare and prove a model; OUT appears complete or not at all."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from rapidformer.checkpoint.exporting.build import (
    Recipes,
    build_model,
    build_recipes,
    find_stored_dtype,
    load_config,
)
from rapidformer.checkpoint.exporting.changes import (
    Changes,
    count_changes,
    find_missing_start,
    refuse_unchanged,
)
from rapidformer.checkpoint.exporting.proof import Proof, prove
from rapidformer.checkpoint.exporting.shards import cast, write_shards
from rapidformer.checkpoint.exporting.source import Source, find_source
from rapidformer.checkpoint.exporting.texts import copy_texts
from rapidformer.checkpoint.publish import get_staging, publish, read_json, start_staging
from rapidformer.errors import CheckpointError, ConfigurationError, ModelError, RapidformerError
from rapidformer.log import get_logger, warn_once
from rapidformer.models.adapter_folder import save_adapter
from rapidformer.models.adapters import find_adapter
from rapidformer.models.location import quiet_transformers
from rapidformer.models.quantizing import describe_merge, forget_quantization

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_SHARD_SIZE = "5GB"
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
    max_shard_size: int | str = MAX_SHARD_SIZE,
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
    with _writing(target):
        return _export(
            source, target,
            dtype=dtype, max_shard_size=max_shard_size, merges=merge, verify=verify,
            allow_unchanged=allow_unchanged,
        )  # fmt: skip


def _export(
    source: Source,
    target: Path,
    *,
    dtype: str | None,
    max_shard_size: int | str,
    merges: bool,
    verify: bool,
    allow_unchanged: bool,
) -> Report:
    say = get_logger().info
    config = load_config(source.description)
    if source.base is not None and forget_quantization(config, source.base) and merges:
        warn_once(describe_merge(source.base))
    kind = DTYPES[dtype] if dtype else find_stored_dtype(source)
    is_adapter = source.adapter is not None and not merges
    say("source    %s", source.describe())
    changes = None
    if is_adapter and source.base is None:
        raise ModelError(
            f"{source.folder}: the weights under the adapter are in no file, so nobody could load "
            "the adapter alone: export with --merge."
        )
    if is_adapter:
        adapted = build_recipes(source, config, merges=False)
        if _is_prompt(adapted):
            # peft computes what it saves of learned tokens, and so needs their values.
            adapted = replace(adapted, model=build_model(source, config))
    if not is_adapter or not _is_prompt(adapted):
        recipes = build_recipes(source, config, merges=source.adapter is not None)
        changes = _compare(recipes, source, config, kind, allow_unchanged)
    staging = start_staging(target)
    if is_adapter:
        _write_adapter(adapted, staging, kind)
        what = "the adapter alone"
    else:
        what = _write_model(recipes, staging, kind, max_shard_size)
        what += " (base model and adapter merged)" * (source.adapter is not None)
    copy_texts(source, staging)
    say("written   %s, %s%s", what, _name(kind), "" if dtype else " as stored")
    proof = _prove(source, config, staging, kind) if verify else None
    if not verify:
        say("verified  no (--no-verify): nothing says that this is the trained model")
    report = Report(
        source=str(source.folder), folder=str(target), dtype=_name(kind),
        is_merged=source.adapter is not None and merges, changes=changes, proof=proof,
    )  # fmt: skip
    _write_report(report, staging)
    publish(target, with_manifest=False)
    say("exported  %s", target)
    return report


def _compare(
    recipes: Recipes, source: Source, config: Any, dtype: torch.dtype, allow_unchanged: bool
) -> Changes | None:
    problem = find_missing_start(source)
    if problem is not None:
        get_logger().info("changes   not counted: %s", problem)
        return None
    changes = count_changes(recipes, source, config, dtype)
    if not allow_unchanged:
        refuse_unchanged(changes)
    get_logger().info("changes   %s", changes.describe())
    return changes


def _prove(source: Source, config: Any, staging: Path, dtype: torch.dtype) -> Proof:
    proof = prove(source, config, staging, dtype)
    get_logger().info("verified  by plain transformers: %s", proof.describe())
    return proof


def _is_prompt(recipes: Recipes) -> bool:
    adapter = find_adapter(recipes.model)
    return adapter is not None and adapter.is_prompt


def _write_model(
    recipes: Recipes, staging: Path, dtype: torch.dtype, max_shard_size: int | str
) -> str:
    try:
        files, size = write_shards(recipes, staging, dtype, max_shard_size)
    except ValueError as reason:
        raise ConfigurationError(f"max_shard_size {max_shard_size!r}: {reason}.") from None
    config = copy.deepcopy(recipes.config)
    config.dtype = str(dtype).removeprefix("torch.")
    with quiet_transformers(None):
        config.save_pretrained(staging)
    plural = "" if files == 1 else "s"
    return f"{len(recipes.files)} tensors in {files} file{plural} ({size / 1e6:,.1f} MB)"


def _write_adapter(adapted: Recipes, staging: Path, dtype: torch.dtype) -> None:
    adapter = find_adapter(adapted.model)
    assert adapter is not None
    trained = {
        name: cast(adapted.read(parameter), dtype)
        for name, parameter in adapted.model.named_parameters()
        if parameter.requires_grad
    }
    save_adapter(adapted.model, adapter, trained, staging)


def _name(dtype: torch.dtype) -> str:
    return next((name for name, each in DTYPES.items() if each is dtype), str(dtype))


# ---- the folder ----------------------------------------------------------------------------------


def _refuse_foreign(target: Path) -> None:
    """Refuse a folder with anything in it that no export wrote."""
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"{target} is a file: choose a folder to export to.")
    if not target.is_dir() or not any(target.iterdir()):
        return
    try:
        ours = read_json(target / _REPORT).get("files")
    except CheckpointError:
        ours = None
    known = {_REPORT, *(ours if isinstance(ours, list) else ())}
    others = sorted(
        str(path.relative_to(target)) for path in target.rglob("*")
        if path.is_file() and str(path.relative_to(target)) not in known
    )  # fmt: skip
    if ours is None or others:
        found = ", ".join(others[:3]) + (", ..." if others[3:] else "")
        raise ConfigurationError(
            f"{target} holds files that no export wrote ({found}): choose another folder."
        )


def _write_report(report: Report, staging: Path) -> None:
    files = sorted(str(p.relative_to(staging)) for p in staging.rglob("*") if p.is_file())
    content = {**asdict(report), "files": files}
    (staging / _REPORT).write_text(json.dumps(content, indent=1), encoding="utf-8")


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Leave nothing behind if something fails, and say why it could not be written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except RapidformerError:
        raise
    except OSError as reason:
        raise CheckpointError(
            f"{target} cannot be written: {reason.strerror or reason}. Nothing was exported."
        ) from None
    except SafetensorError as reason:
        text = str(reason).rpartition("I/O error: ")[2]
        raise CheckpointError(
            f"{target} cannot be written: {text}. Nothing was exported."
        ) from None
    finally:
        shutil.rmtree(get_staging(target), ignore_errors=True)
