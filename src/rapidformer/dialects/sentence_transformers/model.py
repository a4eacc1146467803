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
from rapidformer.models.evaluation_mode import evaluation_mode
from rapidformer.tasks.embedding.embedding import count_prompt
from rapidformer.tasks.embedding.files import (
    DOCUMENT,
    QUERY,
    THEIR_MODES,
    Recipe,
    SentenceFiles,
    read_recipe,
)
from rapidformer.tasks.embedding.objective import Batch, embed_texts, leave_out
from rapidformer.tasks.text.text import get_context_length

_OPTIONS = {"output_value": "sentence_embedding", "precision": "float32"}
"""Of ``encode``: what can only have its default."""


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


def refuse_options(model: Any, options: dict[str, Any]) -> None:
    """Refuse what a model here cannot be built with; a card is not written anyway."""
    given = [name for name in options if name != "model_card_data" and options[name] is not None]
    if given:
        kind = type(model).__name__
        raise ConfigurationError(
            f"{kind}({given[0]}=...) is not supported: build the model with sentence-transformers' "
            f"own {kind}, which the trainer takes as well."
        )


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
        **others: Any,
    ) -> None:
        refuse_options(self, others)
        code = {"trust_remote_code": trust_remote_code}
        self.transformers_model: nn.Module = AutoModel.from_pretrained(
            model_name_or_path, **code, **(model_kwargs or {})
        )
        self.tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **code)
        saved = read_recipe(model_name_or_path)
        self.recipe = replace(
            saved, normalizes=bool(saved.normalizes), prompts={**saved.prompts, **(prompts or {})}
        )
        context = get_context_length(self.tokenizer, self.transformers_model.config)
        self.max_seq_length = min(saved.length or context, context)
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
        truncate_dim: int | None = None,
        **others: Any,
    ) -> Any:
        """The vectors of texts, as an array or a tensor; of a single text, its vector."""
        for name, default in _OPTIONS.items():
            if others.get(name) not in (None, default):
                raise ConfigurationError(f"encode({name}={others[name]!r}) is not supported.")
        if prompt_name is not None and prompt is None and prompt_name not in self.prompts:
            raise ConfigurationError(
                f"encode(prompt_name={prompt_name!r}): the model's prompts are "
                f"{', '.join(self.prompts) or 'none'}."
            )
        before = prompt if prompt is not None else self.prompts.get(prompt_name or "", "")
        texts = [sentences] if isinstance(sentences, str) else list(sentences)
        batches = [texts[i : i + batch_size] for i in range(0, len(texts), batch_size)]
        with evaluation_mode(self.transformers_model):
            embedded = [self._embed(batch, before) for batch in batches]
        vectors = torch.cat(embedded)[:, :truncate_dim] if embedded else torch.zeros(0)
        if normalize_embeddings:
            vectors = nn.functional.normalize(vectors, dim=-1)
        result = vectors[0] if isinstance(sentences, str) else vectors
        return result if convert_to_tensor else result.cpu().numpy()

    def encode_query(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """The vectors of queries, with their prompt."""
        return self._encode_as(QUERY, sentences, options)

    def encode_document(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """The vectors of documents, with their prompt."""
        return self._encode_as(DOCUMENT, sentences, options)

    def _encode_as(self, kind: str, sentences: str | Sequence[str], options: dict[str, Any]) -> Any:
        known = {"prompt_name": kind} if kind in self.prompts else {}
        return self.encode(sentences, **{**known, **options})

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
        recipe = replace(self.recipe, length=self.max_seq_length)
        SentenceFiles(self.tokenizer, recipe, self.get_embedding_dimension()).save_pretrained(path)

    save = save_pretrained

    def _embed(self, texts: list[str], prompt: str) -> torch.Tensor:
        batch: Batch = dict(
            self.tokenizer(
                [prompt + text for text in texts], padding=True, truncation=True,
                max_length=self.max_seq_length, return_tensors="pt",
            ).to(self.device)
        )  # fmt: skip
        recipe, mask = self.recipe, batch["attention_mask"]
        if prompt and not recipe.pools_prompt:
            lengths = mask.new_full([len(texts)], count_prompt(prompt, self.tokenizer))
            batch["pooled"] = leave_out(mask, lengths)
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
    is_known = named.keys() - {"Normalize"} == {"Transformer", "Pooling"}
    if not is_known or pooling not in THEIR_MODES:
        raise ConfigurationError(
            "SentenceTransformerTrainer(model=...) takes a SentenceTransformer of a transformer, "
            "pooling by mean, cls or lasttoken, and maybe Normalize, not "
            f"{type(model).__name__} of {', '.join(named) or 'no such modules'}."
        )
    recipe = Recipe(
        pooling=THEIR_MODES[pooling], normalizes="Normalize" in named,
        pools_prompt=named["Pooling"].include_prompt,
        prompts={name: text for name, text in model.prompts.items() if text},
    )  # fmt: skip
    transformer = named["Transformer"].auto_model
    context = get_context_length(model.tokenizer, transformer.config)
    length = min(model.max_seq_length or context, context)
    return Parts(transformer, model.tokenizer, recipe, length)
