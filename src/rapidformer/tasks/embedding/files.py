"""The files that sentence-transformers reads next to a model: how texts become vectors.

In the words of its older versions, which all versions read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rapidformer.errors import ModelError
from rapidformer.hub import is_hub_reachable, looks_like_path
from rapidformer.strict_json import parse_json

_MODULES = "modules.json"
_SETTINGS = "config_sentence_transformers.json"
_LENGTH = "sentence_bert_config.json"
_POOLING, _NORMALIZE = "1_Pooling", "2_Normalize"
_MODES = {"mean": "mean_tokens", "first": "cls_token", "last": "lasttoken"}
THEIR_MODES = {"mean": "mean", "cls": "first", "lasttoken": "last"}
_KNOWN = ("Transformer", "Pooling", "Normalize")
QUERY, DOCUMENT = "query", "document"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model's hidden states become a vector."""

    pooling: str = "mean"
    normalizes: bool | None = None
    """None: not said."""
    pools_prompt: bool = True
    prompts: dict[str, str] = field(default_factory=dict)
    """By ``query`` and ``document``, and others that are only kept."""
    length: int | None = None
    """Tokens of the longest text; None: not said."""


def read_recipe(
    location: str | None, pooling: str | None = None, cache_dir: str | None = None
) -> Recipe:
    """What the files next to a model say, with another ``pooling`` if it is given; the defaults if
    there are none."""
    folder = None if location is None else _find_folder(location, cache_dir)
    if folder is None:
        return Recipe(pooling=pooling or "mean")
    modules = _read(folder / _MODULES)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    unknown = [kind for kind in kinds if kind not in _KNOWN]
    if unknown:
        raise ModelError(
            f"{location} has a module {unknown[0]} after its transformer, which --task embedding "
            f"does not train: it knows {', '.join(_KNOWN)}."
        )
    settings, lengths = (
        _read(folder / name) if (folder / name).is_file() else {} for name in (_SETTINGS, _LENGTH)
    )
    place = next((m.get("path") for m, k in zip(modules, kinds, strict=True) if k == "Pooling"), "")
    config = _read(folder / str(place) / "config.json") if place else {}
    return Recipe(
        pooling=pooling or _read_mode(config, str(location)),
        normalizes="Normalize" in kinds,
        pools_prompt=bool(config.get("include_prompt", True)),
        prompts={name: text for name, text in (settings.get("prompts") or {}).items() if text},
        length=lengths.get("max_seq_length"),
    )


def _find_folder(location: str, cache_dir: str | None) -> Path | None:
    """The folder with the files, downloaded from the Hub if that is where the model is."""
    if not looks_like_path(location) and not Path(location).exists():
        from huggingface_hub import snapshot_download

        names = [_MODULES, _SETTINGS, _LENGTH, f"{_POOLING}/*"]
        try:
            location = snapshot_download(
                location, cache_dir=cache_dir, local_files_only=not is_hub_reachable(),
                allow_patterns=names,
            )  # fmt: skip
        except (OSError, ValueError):
            return None  # loading the model will say why
    folder = Path(location)
    return folder if (folder / _MODULES).is_file() else None


def _read_mode(config: dict[str, Any], location: str) -> str:
    if not config:
        return "mean"
    newer = config.get("pooling_mode")
    if newer in THEIR_MODES:
        return THEIR_MODES[str(newer)]
    on = [n for n, v in config.items() if n.startswith("pooling_mode_") and v]
    mode = next((m for m, name in _MODES.items() if on == [f"pooling_mode_{name}"]), None)
    if mode is None:
        raise ModelError(
            f"{location} pools by {newer or ', '.join(on)}: use a model with mean, first or last, "
            "or choose one of them with --pooling."
        )
    return mode


def _read(file: Path) -> Any:
    try:
        return parse_json(file.read_bytes())
    except (OSError, ValueError) as reason:
        raise ModelError(f"{file} cannot be read: {reason}.") from None


@dataclass(frozen=True)
class SentenceFiles:
    """A tokenizer that is saved together with a recipe."""

    tokenizer: Any
    recipe: Recipe
    width: int
    """Numbers in a vector."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the tokenizer, and what ``SentenceTransformer(folder)`` reads."""
        target = Path(folder)
        self.tokenizer.save_pretrained(target)
        if (target / "adapter_config.json").is_file():
            # transformers would take the adapter's folder for that of a whole model.
            (target / "config.json").unlink(missing_ok=True)
        kinds = ["Transformer", "Pooling", *["Normalize"] * bool(self.recipe.normalizes)]
        modules = [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for n, (kind, path) in enumerate(zip(kinds, ("", _POOLING, _NORMALIZE), strict=False))
        ]
        pooling = {"word_embedding_dimension": self.width}
        pooling |= {f"pooling_mode_{m}": mode == self.recipe.pooling for mode, m in _MODES.items()}
        pooling["include_prompt"] = self.recipe.pools_prompt
        prompts = {QUERY: "", DOCUMENT: "", **self.recipe.prompts}
        files = {
            _MODULES: modules,
            _SETTINGS: {"prompts": prompts, "similarity_fn_name": "cosine"},
            _LENGTH: {"max_seq_length": self.recipe.length, "do_lower_case": False},
            f"{_POOLING}/config.json": pooling,
        }
        if self.recipe.normalizes:
            files[f"{_NORMALIZE}/config.json"] = {}
        for name, content in files.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
