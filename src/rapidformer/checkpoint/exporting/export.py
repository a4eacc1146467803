"""``rapidformer.export``: write, compare and prove a model; OUT appears complete or not at all."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rapidformer.checkpoint.exporting.build import (
    Recipes,
    build_model,
    build_recipes,
    find_stored_dtype,
)
from rapidformer.checkpoint.exporting.card import Report, check_license, write_card
from rapidformer.checkpoint.exporting.files import (
    REPORT,
    cast,
    copy_texts,
    list_files,
    refuse_foreign,
    staging_for,
    write_shards,
)
from rapidformer.checkpoint.exporting.gguf.file import (
    TYPES,
    check_kind,
    plan_gguf,
    round_to,
    write_gguf,
)
from rapidformer.checkpoint.exporting.onnx import check_onnx, write_onnx
from rapidformer.checkpoint.exporting.proof import Changes, Proof, count_changes, prove
from rapidformer.checkpoint.exporting.push import open_hub, push_folder
from rapidformer.checkpoint.exporting.serving import check_serving
from rapidformer.checkpoint.exporting.source import Source, find_source
from rapidformer.checkpoint.index import name_dtype
from rapidformer.errors import ConfigurationError, ModelError, count
from rapidformer.hub import quiet_transformers
from rapidformer.log import get_logger
from rapidformer.models.adapter_folder import save_adapter
from rapidformer.models.adapters import find_adapter
from rapidformer.models.configuration import read_config
from rapidformer.models.location import OwnCodeError
from rapidformer.models.quantizing import forget_quantization

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = ("transformers", "gguf", "onnx")


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    format: str = "transformers",
    dtype: str | None = None,
    quantize: str | None = None,
    max_shard_size: int | str = "5GB",
    merge: bool = True,
    verify: bool = True,
    allow_unchanged: bool = False,
    base: str | None = None,
    push: str | None = None,
    private: bool = False,
    license: str | None = None,
) -> Report:
    """Export a run, a checkpoint of any layout, a model or an adapter as a folder.

    ``format`` is ``transformers``, ``gguf`` (a language model for llama.cpp and Ollama, quantized
    to ``quantize``) or ``onnx`` (an encoder). An adapter is merged into the weights under it; with
    ``merge=False`` it is exported by itself. The folder is loaded by plain transformers (or
    onnxruntime) and compared with the trained model before it gets its name, unless ``verify`` is
    False. ``base`` is the model that training started from, if the run does not know it. ``push``
    is the repository on the Hub that gets the folder, as one commit.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigurationError(f"dtype {dtype!r} is unknown: use {', '.join(DTYPES)}.")
    quant = _check_format(format, dtype, quantize, merge=merge)
    check_license(license)
    if private and not push:
        raise ConfigurationError("--private needs --push ORG/NAME.")
    target = Path(out).expanduser()
    refuse_foreign(target)
    source = find_source(checkpoint, base)
    if push and not merge and source.base is not None and Path(source.base).is_dir():
        raise ConfigurationError(
            "--push --no-merge: the adapter would name its base model by a folder on this machine "
            f"({source.base}), so nobody else could load it: leave out --no-merge, or give --base "
            "with a name on the Hub."
        )
    hub = open_hub(push, private=private) if push else None
    say = get_logger().info
    with staging_for(target) as staging:
        config = _read_config(source, merge=merge)
        kind = DTYPES[dtype] if dtype else find_stored_dtype(source)
        if format == "onnx":
            check_onnx(config, dtype)
            kind = torch.float32
        kind_name = next((name for name, known in DTYPES.items() if known is kind), str(kind))
        say("source    %s", source.describe())

        def compare(recipes: Recipes) -> Changes | None:
            return count_changes(recipes, source, config, kind, allow_unchanged=allow_unchanged)

        if source.adapter is not None and not merge:
            what = "the adapter alone"
            changes = _write_adapter(source, config, staging, kind, compare)
        else:
            recipes = build_recipes(source, config, merges=source.adapter is not None)
            model = plan_gguf(source, recipes.config, target.name) if format == "gguf" else None
            changes = compare(recipes)
            if model is not None:
                quant = quant or TYPES.get(kind, "F32")
                what, kind_name = write_gguf(model, recipes, staging, quant), quant
            elif format == "onnx":
                what = write_onnx(recipes, staging)
            else:
                what = _write_model(recipes, staging, kind, max_shard_size)
            what += " (base model and adapter merged)" * (source.adapter is not None)
        if format != "gguf":
            copy_texts(source, staging)
        is_as_stored = format == "transformers" and dtype is None
        say("written   %s, %s%s", what, kind_name, " as stored" * is_as_stored)
        serving = check_serving(staging) if format == "transformers" else None
        proof = _prove(format, source, config, staging, kind, quant) if verify else None
        if not verify:
            say("verified  no (--no-verify): nothing says that this is the trained model")
        report = Report(
            source=str(source.folder), folder=str(target), format=format, dtype=kind_name,
            is_merged=source.adapter is not None and merge, changes=changes, proof=proof,
            serving=serving,
        )  # fmt: skip
        write_card(staging, source, report, push or target.name, license)
        content = {**asdict(report), "files": sorted(list_files(staging))}
        (staging / REPORT).write_text(json.dumps(content, indent=1), encoding="utf-8")
    say("exported  %s", target)
    if hub is not None:
        push_folder(hub, target)
    return report


def _check_format(
    format: str, dtype: str | None, quantize: str | None, *, merge: bool
) -> str | None:
    """The quantization by its proper name; refuses settings that do not fit together."""
    if format not in FORMATS:
        raise ConfigurationError(f"format {format!r} is unknown: use {', '.join(FORMATS)}.")
    if quantize is not None and (format != "gguf" or dtype is not None):
        reason = "--format gguf" if format != "gguf" else "no --dtype: it is a type of its own"
        raise ConfigurationError(f"--quantize {quantize} needs {reason}.")
    if format != "transformers" and not merge:
        raise ConfigurationError(
            f"--no-merge has no meaning for --format {format}, which holds a whole model: leave it "
            "out, and the adapter is merged."
        )
    return check_kind(quantize) if format == "gguf" else None


def _read_config(source: Source, *, merge: bool) -> Any:
    try:
        config = read_config(str(source.description), local_files_only=True)
    except OwnCodeError:
        raise ModelError(
            f"{source.folder} comes with its own Python code, which export does not run: use "
            "engine.export in the script that trained it."
        ) from None
    if source.base is not None:
        forget_quantization(config, source.base, merges=merge)
    return config


def _prove(
    format: str, source: Source, config: Any, staging: Path, kind: torch.dtype, quant: str | None
) -> Proof:
    if format == "gguf":
        rounds = None if quant in (None, "F32") else round_to(quant)
        return prove(source, config, staging, rounds, by="transformers' GGUF reader")
    if format == "onnx":
        return prove(source, config, staging, None, by="onnxruntime", batched=True)
    is_rounded = kind.itemsize < torch.float32.itemsize
    return prove(source, config, staging, (lambda one: one.to(kind)) if is_rounded else None)


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
