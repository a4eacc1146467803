"""A GGUF export: the file, tensor by tensor, an Ollama Modelfile, and a configuration.

K-quants are llama.cpp's own work. The configuration is not for llama.cpp: transformers' reader
takes only part of what it needs from a file's keys (not GPT-2's number of positions, for example).
"""

from __future__ import annotations

import functools
import importlib.util
import math
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rapidformer.checkpoint.exporting.build import Recipes
from rapidformer.checkpoint.exporting.files import copy_texts, load_tokenizer
from rapidformer.checkpoint.exporting.gguf.families import (
    Metadata,
    adapt_config,
    compute_rope_factors,
    find_family,
)
from rapidformer.checkpoint.exporting.gguf.modelfile import find_end, read_turns, write_modelfile
from rapidformer.checkpoint.exporting.gguf.tokenizer import describe_tokenizer, get_chat_template
from rapidformer.checkpoint.exporting.source import Source
from rapidformer.errors import ConfigurationError, ModelError
from rapidformer.hub import quiet_transformers
from rapidformer.log import get_logger

TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
QUANTIZER = "llama-quantize"
# What a K-quant is measured by: the nearest simple type that Python can write.
K_QUANTS = {
    "Q3_K_S": "Q4_0", "Q3_K_M": "Q4_0", "Q3_K_L": "Q4_0", "Q4_K_S": "Q4_0", "Q4_K_M": "Q4_0",
    "Q5_K_S": "Q5_0", "Q5_K_M": "Q5_0", "Q6_K": "Q5_0",
}  # fmt: skip
_Tensors = dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]]
"""The shape of each tensor in the file, and what computes it."""
# Always in fp32, as llama.cpp's own converter has them: what has one dimension, and these.
_PRECISE = ("_norm.weight", "position_embd.weight", "rope_freqs.weight")


def check_kind(kind: str | None) -> str | None:
    """The quantization by its proper name; refuses what cannot be written here."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigurationError("--format gguf needs gguf: pip install 'rapidformer[export]'.")
    if kind is None:
        return None
    name = kind.upper()
    if name not in ("Q8_0", *K_QUANTS):
        known = ", ".join(["q8_0", *(quant.lower() for quant in K_QUANTS)])
        raise ConfigurationError(
            f"--quantize {kind} is unknown: use {known}; --dtype fp32, fp16 or bf16 does not "
            "quantize."
        )
    if name in K_QUANTS and shutil.which(QUANTIZER) is None:
        raise ConfigurationError(
            f"--quantize {kind} needs {QUANTIZER} of llama.cpp, which is not on the PATH: install "
            "llama.cpp (github.com/ggml-org/llama.cpp), or use --quantize q8_0."
        )
    return name


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
        _write_file(whole, recipes, plan.metadata, "F32")
        _quantize_file(whole, file, kind)
        whole.unlink()
        types = f"{len(recipes.files)} tensors, quantized by llama.cpp"
    else:
        types = _write_file(file, recipes, plan.metadata, kind)
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


def _write_file(file: Path, recipes: Recipes, metadata: Metadata, kind: str) -> str:
    """Write all tensors, with one of them in memory at a time; returns how many of which type."""
    import gguf

    tensors = _list_tensors(gguf, recipes)
    writer: Any = gguf.GGUFWriter(file, find_family(recipes.config).architecture)
    name = "ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"
    writer.add_file_type(gguf.LlamaFileType[name])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in metadata.items():
        _add(writer, key, value)
    types = {name: _choose_type(gguf, name, shape, kind) for name, (shape, _) in tensors.items()}
    for name, (shape, _) in tensors.items():
        items, size = gguf.GGML_QUANT_SIZES[types[name]]
        bytes_ = math.prod(shape) // items * size
        writer.add_tensor_info(name, shape, None, bytes_, raw_dtype=types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, (_, read) in tensors.items():
        writer.write_tensor_data(gguf.quants.quantize(read().contiguous().numpy(), types[name]))
    writer.close()
    counts = Counter(chosen.name for chosen in types.values())
    return ", ".join(f"{number} in {chosen}" for chosen, number in counts.items())


def _list_tensors(gguf: Any, recipes: Recipes) -> _Tensors:
    """By their names in the file, which gguf knows."""
    config = recipes.config
    family = find_family(config)
    tensors: _Tensors = {}
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[family.architecture], config.num_hidden_layers)

    def read(name: str, tensor: Tensor) -> Tensor:
        return family.change(config, name, recipes.read(tensor).float())

    for name, tensor in recipes.files.items():
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise ModelError(f"GGUF: {family.architecture} has no tensor for {name}.")
        shape = family.change(config, name, torch.empty(tensor.shape, device="meta")).shape
        tensors[new] = tuple(shape), functools.partial(read, name, tensor)
    factors = compute_rope_factors(config)
    if factors is not None:
        tensors["rope_freqs.weight"] = tuple(factors.shape), factors.float
    return tensors


def _choose_type(gguf: Any, name: str, shape: tuple[int, ...], kind: str) -> Any:
    if len(shape) < 2 or name.endswith(_PRECISE):
        return gguf.GGMLQuantizationType.F32
    chosen = gguf.GGMLQuantizationType[kind]
    fits = shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0] == 0
    return chosen if fits else gguf.GGMLQuantizationType.F16  # as llama.cpp's own converter does


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def round_to(kind: str) -> Callable[[Tensor], Tensor]:
    """What remains of a tensor that is stored in a type of the file."""
    import gguf

    def round_tensor(tensor: Tensor) -> Tensor:
        chosen = _choose_type(gguf, "", tuple(tensor.shape), K_QUANTS.get(kind, kind))
        stored = gguf.quants.quantize(tensor.detach().float().contiguous().numpy(), chosen)
        return torch.from_numpy(gguf.quants.dequantize(stored, chosen).copy())

    return round_tensor


def _quantize_file(source: Path, target: Path, kind: str) -> None:
    """A K-quant of a file, by llama.cpp."""
    done = subprocess.run(
        [QUANTIZER, str(source), str(target), kind], capture_output=True, text=True, check=False
    )
    if done.returncode != 0 or not target.is_file():
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise ModelError(f"{QUANTIZER} failed: {lines[-1]}. Nothing was exported.")
