"""``SentenceTransformer``: a transformer, its tokenizer and how its states become vectors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

from rapidformer.errors import ConfigurationError
from rapidformer.tasks.embedding.collate import Batch
from rapidformer.tasks.embedding.files import DOCUMENT, QUERY, Recipe, SentenceFiles, read_recipe
from rapidformer.tasks.embedding.objective import embed_texts

_LONGEST = 512
_THEIRS = {"mean": "mean", "cls": "first", "lasttoken": "last"}


class Parts(NamedTuple):
    """What a model of sentences consists of."""

    transformer: nn.Module
    tokenizer: Any
    recipe: Recipe
    length: int


class ModelCard:
    """What evaluators tell their numbers; the metrics of a run are in its folder."""

    def set_evaluation_metrics(self, *numbers: Any, **named: Any) -> None:
        """Nothing is written about them."""


class SentenceTransformer:
    """Turns texts into vectors."""

    similarity_fn_name = "cosine"
    model_card_data = ModelCard()

    def __init__(
        self,
        model_name_or_path: str,
        *,
        device: str | None = None,
        prompts: dict[str, str] | None = None,
        trust_remote_code: bool = False,
        model_kwargs: dict[str, Any] | None = None,
    ) -> None:
        code = {"trust_remote_code": trust_remote_code}
        self.transformers_model: nn.Module = AutoModel.from_pretrained(
            model_name_or_path, **code, **(model_kwargs or {})
        )
        self.tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **code)
        saved = read_recipe(model_name_or_path)
        self.recipe = replace(
            saved, normalizes=bool(saved.normalizes), prompts={**saved.prompts, **(prompts or {})}
        )
        self.max_seq_length = min(self.tokenizer.model_max_length, _LONGEST)
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.transformers_model.to(device or default).eval()

    @property
    def device(self) -> torch.device:
        return next(self.transformers_model.parameters()).device

    @property
    def prompts(self) -> dict[str, str]:
        return self.recipe.prompts

    def get_embedding_dimension(self) -> int:
        """Numbers in a vector."""
        model: Any = self.transformers_model
        return int(model.config.hidden_size)

    get_sentence_embedding_dimension = get_embedding_dimension

    @torch.no_grad()
    def encode(
        self,
        sentences: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        convert_to_tensor: bool = False,
        normalize_embeddings: bool = False,
        **others: Any,
    ) -> Any:
        """The vectors of texts, as an array or a tensor; of a single text, its vector."""
        before = prompt if prompt is not None else self.prompts.get(prompt_name or "", "")
        texts = [
            before + text for text in ([sentences] if isinstance(sentences, str) else sentences)
        ]
        was_training = self.transformers_model.training
        self.transformers_model.eval()
        batches = [texts[i : i + batch_size] for i in range(0, len(texts), batch_size)]
        vectors = torch.cat([self._embed(batch) for batch in batches])
        self.transformers_model.train(was_training)
        if normalize_embeddings:
            vectors = nn.functional.normalize(vectors, dim=-1)
        found = vectors[0] if isinstance(sentences, str) else vectors
        return found if convert_to_tensor else found.cpu().numpy()

    def encode_query(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """The vectors of queries, with their prompt."""
        return self.encode(sentences, **{"prompt_name": QUERY, **options})

    def encode_document(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """The vectors of documents, with their prompt."""
        return self.encode(sentences, **{"prompt_name": DOCUMENT, **options})

    def similarity(self, first: Any, second: Any) -> torch.Tensor:
        """The cosine of each vector and each other one."""
        one, other = (
            nn.functional.normalize(torch.as_tensor(vectors), dim=-1) for vectors in (first, second)
        )
        return one @ other.T

    def save_pretrained(self, path: str | Path, **options: Any) -> None:
        """Write a folder that this class and sentence-transformers' own load."""
        model: Any = self.transformers_model
        model.save_pretrained(path)
        parts = take_parts(self)
        width = self.get_embedding_dimension()
        SentenceFiles(parts.tokenizer, parts.recipe, width, parts.length).save_pretrained(path)

    save = save_pretrained

    def _embed(self, texts: list[str]) -> torch.Tensor:
        batch: Batch = dict(
            self.tokenizer(
                texts, padding=True, truncation=True, max_length=self.max_seq_length,
                return_tensors="pt",
            ).to(self.device)
        )  # fmt: skip
        recipe = self.recipe
        return embed_texts(
            self.transformers_model, batch, recipe.pooling, normalizes=bool(recipe.normalizes)
        )


def take_parts(model: Any) -> Parts:
    """The parts of a model: of this class, or of sentence-transformers' own."""
    if isinstance(model, SentenceTransformer):
        return Parts(model.transformers_model, model.tokenizer, model.recipe, model.max_seq_length)
    modules: Iterable[Any] = model if isinstance(model, nn.Sequential) else ()
    named = {type(module).__name__: module for module in modules}
    pooling = getattr(named.get("Pooling"), "pooling_mode", None)
    if (
        "Transformer" not in named
        or pooling not in _THEIRS
        or len(named) > 2 + ("Normalize" in named)
    ):
        raise ConfigurationError(
            "SentenceTransformerTrainer(model=...) takes a SentenceTransformer of a transformer, "
            "pooling by mean, cls or lasttoken, and maybe Normalize, not "
            f"{type(model).__name__} of {', '.join(named) or 'no such modules'}."
        )
    recipe = Recipe(
        pooling=_THEIRS[pooling], normalizes="Normalize" in named,
        pools_prompt=named["Pooling"].include_prompt,
        prompts={name: text for name, text in model.prompts.items() if text},
    )  # fmt: skip
    length = min(model.max_seq_length or _LONGEST, _LONGEST)
    return Parts(named["Transformer"].auto_model, model.tokenizer, recipe, length)
