"""Compute an exported folder's outputs in a new process, without importing this library."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Rows = list[dict[str, Tensor]]


def compute_outputs(model: Any, rows: Rows) -> dict[str, Tensor]:
    """The logits of each row, in fp32; hidden states of a model without a head."""
    outputs: dict[str, Tensor] = {}
    for number, row in enumerate(rows):
        with torch.no_grad():
            output = dict(model(**row).items())
        for name in [key for key in output if "logits" in key] or ["last_hidden_state"]:
            outputs[f"{number}.{name}"] = output[name].float().contiguous()
    return outputs


def save_rows(rows: Rows, file: Path) -> None:
    """Write the inputs where the process finds them."""
    named = {f"{i}.{name}": tensor for i, row in enumerate(rows) for name, tensor in row.items()}
    save_file(named, file)


def load_model(folder: Path) -> Any:
    """The exported model, or its base with the exported adapter; whatever its format is."""
    import transformers

    file = next(iter([*folder.glob("*.gguf"), *folder.glob("*.onnx")]), None)
    if file is not None:
        return _load_gguf(file) if file.suffix == ".gguf" else _load_onnx(file)
    adapter, location = folder / "adapter_config.json", str(folder)
    if adapter.is_file():
        location = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model_class = getattr(transformers, config.architectures[0])
    model, report = model_class.from_pretrained(
        location, config=config, dtype=torch.float32, output_loading_info=True,
        ignore_mismatched_sizes=adapter.is_file(),
    )  # fmt: skip
    if adapter.is_file():
        from peft import PeftModel

        return PeftModel.from_pretrained(model, str(folder)).eval()
    problems = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if problems:
        sys.exit(f"the files do not fit the model: {json.dumps(problems)[:500]}")
    return model.eval()


def _load_gguf(file: Path) -> Any:
    """A model from a GGUF file; the configuration beside it must be what the file says."""
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.AutoConfig.from_pretrained(file.parent)
    rope = getattr(config, "rope_parameters", {})
    wanted = {**config.to_dict(), **rope.get("full_attention", rope)}
    for name, value in load_gguf_checkpoint(str(file))["config"].items():
        # A model's configuration is often wrong about its tokens; the tokenizer is not.
        expected = None if name.endswith("_token_id") else wanted.get(name)
        if not isinstance(value, (int, float)) or not isinstance(expected, (int, float)):
            continue
        if abs(value - expected) > 1e-6 * abs(expected):
            sys.exit(f"the file says {name} {value}, the model has {expected}")
    model_class = getattr(transformers, config.architectures[0])
    model, report = model_class.from_pretrained(
        file.parent, gguf_file=file.name, config=config, dtype=torch.float32,
        output_loading_info=True,
    )  # fmt: skip
    if report["missing_keys"] or report["mismatched_keys"]:
        sys.exit(f"the file lacks weights of the model: {sorted(report['missing_keys'])[:5]}")
    return model.eval()


def _load_onnx(file: Path) -> Any:
    """A graph as a function from named tensors to named tensors."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    inputs = {entry.name for entry in session.get_inputs()}

    def compute(**row: Tensor) -> dict[str, Tensor]:
        given = {name: tensor.numpy() for name, tensor in row.items() if name in inputs}
        results = session.run(names, given)
        return {name: torch.from_numpy(result) for name, result in zip(names, results, strict=True)}

    return compute


def main(folder: str, inputs: str, outputs: str) -> None:
    model = load_model(Path(folder))
    rows: dict[int, dict[str, Tensor]] = {}
    for key, tensor in load_file(inputs).items():  # as save_rows has named them
        number, _, name = key.partition(".")
        rows.setdefault(int(number), {})[name] = tensor
    save_file(compute_outputs(model, [rows[number] for number in sorted(rows)]), outputs)
    if "rapidformer" in sys.modules:
        sys.exit("rapidformer was imported, so this proves nothing about plain transformers")


if __name__ == "__main__":
    main(*sys.argv[1:])
