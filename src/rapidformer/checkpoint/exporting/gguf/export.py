"""Write the folder of a GGUF export: the file, an Ollama Modelfile, and a configuration.

The configuration is not for llama.cpp: transformers' reader takes only part of what it needs from a
file's keys (not GPT-2's number of positions, for example).
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.exporting.build import Recipes
from rapidformer.checkpoint.exporting.files import copy_texts, load_tokenizer
from rapidformer.checkpoint.exporting.gguf.families import Metadata, adapt_config, find_family
from rapidformer.checkpoint.exporting.gguf.file import K_QUANTS, quantize_file, write_file
from rapidformer.checkpoint.exporting.gguf.modelfile import find_end, read_turns, write_modelfile
from rapidformer.checkpoint.exporting.gguf.tokenizer import describe_tokenizer, get_chat_template
from rapidformer.checkpoint.exporting.source import Source
from rapidformer.errors import ModelError
from rapidformer.hub import quiet_transformers
from rapidformer.log import get_logger


@dataclass(frozen=True)
class Plan:
    """What a file says besides its tensors."""

    name: str
    tokenizer: Any
    metadata: Metadata


def plan_gguf(source: Source, config: Any, name: str) -> Plan:
    """All keys of the file; refuses what cannot be written, before anything is."""
    family = find_family(config)
    keys = {f"{family.architecture}.{key}": v for key, v in family.describe(config).items()}
    tokenizer = _load_tokenizer(source)
    metadata = {"general.name": name, "general.type": "model", **keys}
    metadata |= describe_tokenizer(tokenizer, config.vocab_size)
    if get_chat_template(tokenizer):
        _follow_template(tokenizer, metadata)
    return Plan(name, tokenizer, metadata)


def write_gguf(plan: Plan, recipes: Recipes, folder: Path, kind: str) -> str:
    """Write the model as ``NAME-KIND.gguf``; returns what was written."""
    file = folder / f"{plan.name}-{kind}.gguf"
    if kind in K_QUANTS:
        whole = folder / "whole.gguf"
        write_file(whole, recipes, plan.metadata, "F32")
        quantize_file(whole, file, kind)
        whole.unlink()
        types = f"{len(recipes.files)} tensors, quantized by llama.cpp"
    else:
        types = write_file(file, recipes, plan.metadata, kind)
    with quiet_transformers(None):
        adapt_config(recipes.config).save_pretrained(folder)
    write_modelfile(folder / "Modelfile", file.name, plan.tokenizer, plan.metadata)
    return f"{file.name} ({file.stat().st_size / 1e6:,.1f} MB): {types}"


def _follow_template(tokenizer: Any, metadata: Metadata) -> None:
    """Begin and end as the model was trained to: with the tokens of its chat template."""
    turns = read_turns(tokenizer)
    if turns is None:
        return
    begins = bool(tokenizer.bos_token) and turns.begin.startswith(tokenizer.bos_token)
    if metadata["tokenizer.ggml.add_bos_token"] and not begins:
        name = tokenizer.bos_token
        get_logger().info("template  it does not begin with %s: llama.cpp will not add it", name)
        metadata["tokenizer.ggml.add_bos_token"] = False
    end = find_end(tokenizer, turns)
    if end is not None and end != tokenizer.eos_token:
        metadata["tokenizer.ggml.eot_token_id"] = tokenizer.convert_tokens_to_ids(end)


def _load_tokenizer(source: Source) -> Any:
    """The tokenizer that was saved with the model, or that of its base."""
    with tempfile.TemporaryDirectory() as place:
        copy_texts(source, Path(place))
        (Path(place) / "config.json").write_bytes((source.description / "config.json").read_bytes())
        tokenizer = load_tokenizer(place)
    if tokenizer is None:
        raise ModelError("GGUF: the model has no tokenizer, without which nobody can run it.")
    return tokenizer
