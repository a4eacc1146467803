"""An encoder as one ONNX graph, for batches and texts of any size."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.checkpoint.exporting import plain_process
from rapidformer.checkpoint.exporting.build import Recipes
from rapidformer.checkpoint.exporting.files import write_shards
from rapidformer.compat.patches import quieten
from rapidformer.errors import ConfigurationError, ModelError
from rapidformer.hub import quiet_transformers

_FILE = "model.onnx"
_OPSET = 18
_TYPES = (
    "bert", "distilbert", "roberta", "xlm-roberta", "camembert", "electra", "modernbert", "deberta",
    "deberta-v2",
)  # fmt: skip
_HEADS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
          "ForMaskedLM")  # fmt: skip


def check_onnx(config: Any, dtype: str | None) -> None:
    """Refuse what is not written as ONNX."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            raise ConfigurationError(
                f"--format onnx needs {name}: pip install 'rapidformer[export]'."
            )
    if dtype not in (None, "fp32"):
        raise ConfigurationError(f"--format onnx writes fp32, not {dtype}.")
    name = next(iter(config.architectures or ()), "")
    if config.model_type not in _TYPES or not name.endswith(_HEADS):
        raise ModelError(
            f"ONNX: {name or 'a model'} of type {config.model_type} cannot be written; encoders of "
            f"these types can: {', '.join(_TYPES)}; with these heads: {', '.join(_HEADS)}."
        )


def write_onnx(recipes: Recipes, folder: Path) -> str:
    """Write the graph with its weights; returns what was written."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    with tempfile.TemporaryDirectory(dir=folder) as place, quiet_transformers(None):
        write_shards(recipes, Path(place), torch.float32, "5GB")
        recipes.config.save_pretrained(place)
        model: Any = plain_process.load_model(Path(place))
        recipes.config.save_pretrained(folder)
    model.config.return_dict = True
    # Plain matrix products: every runtime has them.
    model.set_attn_implementation("eager")
    graph = _Graph(model)
    example = graph.build_example()
    any_size = torch.export.Dim.DYNAMIC
    with _quietly():
        program = torch.onnx.export(
            graph, (), kwargs={"given": example}, dynamo=True, opset_version=_OPSET,
            dynamic_shapes={"given": {name: {0: any_size, 1: any_size} for name in example}},
            input_names=list(example), output_names=graph.outputs, optimize=True,
        )  # fmt: skip
        assert program is not None
        # Lines of Python code that each node came from, with the folders of this machine.
        ClearMetadataAndDocStringPass()(program.model)
        program.save(folder / _FILE, include_initializers=True)
    inputs, outputs = ", ".join(example), ", ".join(graph.outputs)
    return f"{_FILE} (opset {_OPSET}): {inputs} -> {outputs}; any batch, any length"


class _Graph(nn.Module):
    """A model from named inputs to its logits, or its hidden states if it has no head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        row = self.build_example()
        with torch.no_grad():
            self.outputs = [
                name.partition(".")[2] for name in plain_process.compute_outputs(model, [row])
            ]

    def build_example(self) -> dict[str, Tensor]:
        """Two rows of one size."""
        ids = torch.arange(2 * 8).reshape(2, 8) % self.model.config.vocab_size
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        takes = inspect.signature(self.model.forward).parameters
        if "token_type_ids" in takes and getattr(self.model.config, "type_vocab_size", 0) > 1:
            row["token_type_ids"] = torch.zeros_like(ids)
        return row

    def forward(self, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        output = self.model(**given)
        return tuple(output[name] for name in self.outputs)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """The exporter prints its progress and warns about what no user can change."""
    loggers = quieten("torch.onnx", "onnxscript", "onnx_ir")
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), loggers:
        warnings.simplefilter("ignore")
        yield
