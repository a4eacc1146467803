"""``CrossEncoder``, which reads two texts together and scores them, and its trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rapidformer.dialects.sentence_transformers.arguments import CrossEncoderTrainingArguments
from rapidformer.dialects.sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from rapidformer.dialects.sentence_transformers.losses import Loss
from rapidformer.dialects.sentence_transformers.model import ModelCard, refuse_options
from rapidformer.dialects.sentence_transformers.trainer import PairTrainer
from rapidformer.errors import ConfigurationError
from rapidformer.models.evaluation_mode import evaluation_mode
from rapidformer.tasks.base import PreparedData
from rapidformer.tasks.embedding.columns import PairColumns
from rapidformer.tasks.embedding.reranking import Reranking, read_activation
from rapidformer.tasks.text.text import get_context_length

Activation = Callable[[Tensor], Tensor]
_ACTIVATIONS = {"Sigmoid": nn.Sigmoid, "Identity": nn.Identity}
_HARMLESS = {"show_progress_bar", "convert_to_numpy", "num_workers"}
"""Options of ``predict`` that do not change the scores."""


class Parts(NamedTuple):
    """What a reranker consists of."""

    transformer: nn.Module
    tokenizer: Any
    length: int


class CrossEncoder:
    """Scores pairs of texts."""

    def __init__(
        self,
        model_name_or_path: str,
        num_labels: int | None = None,
        max_length: int | None = None,
        activation_fn: Activation | None = None,
        *,
        device: str | None = None,
        trust_remote_code: bool = False,
        model_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        refuse_options(self, others)
        if num_labels not in (None, 1):
            raise ConfigurationError(
                f"CrossEncoder(num_labels={num_labels}) is not supported: it has one score. "
                "Classes are learnt by `rapidformer --task sequence_classification`."
            )
        code = {"trust_remote_code": trust_remote_code}
        config = AutoConfig.from_pretrained(model_name_or_path, **code)
        architectures = getattr(config, "architectures", None) or ()
        if config.num_labels != 1 and any("Classification" in kind for kind in architectures):
            raise ConfigurationError(
                f"{model_name_or_path} has a head for {config.num_labels} classes, and a "
                "CrossEncoder has one score: use it with `rapidformer predict --load`, or start "
                "from a model without such a head."
            )
        config.num_labels = 1
        self.model: Any = AutoModelForSequenceClassification.from_pretrained(
            model_name_or_path, config=config, **code, **(model_kwargs or {})
        )
        self.tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **code)
        self.max_seq_length = max_length or get_context_length(self.tokenizer, config)
        saved = read_activation(config).rpartition(".")[2]
        self.activation_fn = activation_fn or _ACTIVATIONS.get(saved, nn.Sigmoid)()
        self.model_card_data = ModelCard()
        self.model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()

    num_labels = 1

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @torch.no_grad()
    def predict(
        self,
        inputs: Sequence[Any],
        batch_size: int = 32,
        activation_fn: Activation | None = None,
        convert_to_tensor: bool = False,
        **others: Any,
    ) -> Any:
        """The scores of pairs, as an array or a tensor; of a single pair, its score."""
        for name, value in others.items():
            if name not in _HARMLESS and value not in (None, False):
                raise ConfigurationError(f"predict({name}={value!r}) is not supported.")
        is_single = len(inputs) > 0 and isinstance(inputs[0], str)
        pairs = [inputs] if is_single else list(inputs)
        activation = activation_fn or self.activation_fn
        batches = [pairs[start : start + batch_size] for start in range(0, len(pairs), batch_size)]
        with evaluation_mode(self.model):
            scores = [activation(self._score(batch)) for batch in batches]
        found = torch.cat(scores) if scores else torch.zeros(0)
        result = found[0] if is_single else found
        return result if convert_to_tensor else result.cpu().numpy()

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """The documents from the best to the worst, by number and score."""
        scores = self.predict([(query, text) for text in documents], **options).tolist()
        order = sorted(range(len(scores)), key=lambda number: -scores[number])
        found: list[dict[str, Any]] = [{"corpus_id": n, "score": scores[n]} for n in order[:top_k]]
        if return_documents:
            found = [{**each, "text": documents[each["corpus_id"]]} for each in found]
        return found

    def save_pretrained(self, path: str | Path, **options: Any) -> None:
        """Write a folder that this class and sentence-transformers' own load."""
        name_activation(self)
        self.model.save_pretrained(path)
        self.tokenizer.model_max_length = self.max_seq_length
        self.tokenizer.save_pretrained(path)

    save = save_pretrained

    def _score(self, pairs: Sequence[Any]) -> Tensor:
        inputs = self.tokenizer(
            [first for first, _ in pairs], [second for _, second in pairs], padding=True,
            truncation=True, max_length=self.max_seq_length, return_tensors="pt",
        ).to(self.device)  # fmt: skip
        return self.model(**inputs).logits.float().squeeze(-1)


def name_activation(model: Any) -> None:
    """Let the configuration say what turns outputs into scores, for folders that are saved."""
    kind = type(model.activation_fn)
    model.config.sentence_transformers = {"activation_fn": f"{kind.__module__}.{kind.__name__}"}


def take_parts(model: Any) -> Parts:
    """The parts of a model: of this class, or of sentence-transformers' own."""
    is_known = isinstance(model, (CrossEncoder, nn.Sequential)) and hasattr(model, "activation_fn")
    if not is_known or getattr(model.config, "num_labels", 0) != 1:
        raise ConfigurationError(
            "CrossEncoderTrainer(model=...) takes a CrossEncoder of a transformer with "
            f"num_labels=1, not {type(model).__name__}."
        )
    name_activation(model)
    context = get_context_length(model.tokenizer, model.config)
    return Parts(model.model, model.tokenizer, min(model.max_seq_length or context, context))


class CrossEncoderTrainer(PairTrainer):
    """Trains a CrossEncoder on pairs of texts: columns count by their order, as in its own."""

    room = "rapidformer.dialects.sentence_transformers.cross_encoder"
    arguments_class = CrossEncoderTrainingArguments
    task: Reranking

    def _take(self, model: Any) -> Any:
        self.task, self._parts = Reranking(), take_parts(model)
        return self._parts.transformer

    def _choose_loss(self) -> Loss:
        return BinaryCrossEntropyLoss()

    def _prepare_pairs(self, tables: Any, columns: PairColumns) -> PreparedData:
        _, tokenizer, length = self._parts
        tokenizer.model_max_length = length  # as it is saved, it cuts where training did
        return self.task.encode_tables(self._build_parts(tokenizer, length), tables, columns)
