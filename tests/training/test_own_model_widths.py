"""Models that are not transformers' own, with rows of all lengths: a few graphs replay them if more
padding changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertModel
from transformers.modeling_outputs import SequenceClassifierOutput

from rapidformer.accel.cuda_graph.columns import _find_ignored_label
from rapidformer.data.batch import IGNORED_LABEL
from rapidformer.log import warn_once
from tests.training.test_cuda_graph import Again, Mixed, make_rows


class Pooled(nn.Module):
    """A classifier around a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        config = BertConfig(vocab_size=60, hidden_size=32, max_position_embeddings=64, **sizes)
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(32, 2)

    def pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return (hidden * mask).sum(1) / mask.sum(1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        hidden = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.head(self.pool(hidden, attention_mask.unsqueeze(-1)))
        loss = functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class Own(Pooled):
    """No part of it is transformers': its positions end at 56."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(60, 32), nn.Embedding(56, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def place(self, places: Tensor) -> Tensor:
        return self.places(places)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.words(input_ids) + self.place(places)
        hidden = self.encoder(hidden, src_key_padding_mask=attention_mask == 0)
        logits = self.head(self.pool(hidden, attention_mask.unsqueeze(-1)))
        loss = functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class MeanOverAll(Pooled):
    """Padding has a share in its result."""

    def pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden.mean(1)


class Hidden(Pooled):
    """So it has here, as soon as two numbers leave zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.zeros(2))

    def pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return super().pool(hidden, mask) + self.gates.prod() * hidden.mean(1)


class OnlyTraining(Pooled):
    """Padding has a share in training alone."""

    def pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden.mean(1) if self.training else super().pool(hidden, mask)


class BestTokens(Pooled):
    """Padding may be among them."""

    def pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden.transpose(1, 2).topk(4)[0].mean(-1)


class LargestOrZero(Pooled):
    """The zeros of padding count where all numbers of a row are negative: in a short row."""

    def pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return (hidden + 0.9).masked_fill(mask == 0, 0.0).amax(1)


class Pairs(Pooled):
    """Takes tokens in pairs; the last one of an odd number is left out."""

    def pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        pairs = functional.avg_pool1d((hidden * mask).transpose(1, 2), 2)
        return pairs.sum(-1) / mask.sum(1)


class Tags(Own):
    """Has a label for each token."""

    ignored = -1

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        hidden = self.encoder(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
        logits = self.head(hidden)
        losses = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=self.ignored
        )
        return SequenceClassifierOutput(loss=losses, logits=logits)


class LaterPlaces(Own):
    """Its positions begin at 2, as some models of transformers count them."""

    def place(self, places: Tensor) -> Tensor:
        return self.places(places + 2)


class Short(Mixed):
    """Rows that such a model takes."""

    def train_valid_test_datasets_provider(self) -> Any:
        return [row for row in self._rows if len(row["input_ids"]) <= 54], None, None, None


class Padded(Mixed):
    """Each token of a row has a label, that of padding is -1."""

    def train_valid_test_datasets_provider(self) -> Any:
        tags = [
            {"input_ids": row["input_ids"], "labels": [token % 2 for token in row["input_ids"]]}
            for row in self._rows
        ]
        return tags, None, None, self._collate

    def _collate(self, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        fills = {"input_ids": 0, "attention_mask": 0, "labels": -1}
        full = [{**row, "attention_mask": [1] * len(row["labels"])} for row in rows]
        return {
            name: pad_sequence([torch.tensor(row[name]) for row in full], True, fill)
            for name, fill in fills.items()
        }


def train(model: nn.Module, capture: Any, kind: type[Mixed] = Mixed) -> list[dict[str, float]]:
    warn_once.cache_clear()
    rows = sorted(make_rows(96, longest=56), key=lambda row: len(row["input_ids"]) % 2)
    run = kind(model, rows, capture)
    run.train()
    return run.values.lines


@pytest.mark.parametrize("kind", [Pooled, Own])
def test_a_few_graphs_replay_all_lengths(
    kind: type[Pooled], caplog: pytest.LogCaptureFixture
) -> None:
    plain, capture = train(kind(), None), Again()
    graphed = train(kind(), capture)
    assert "batches keep their widths" not in caplog.text
    assert 1 <= capture.recorded <= 6, "no wider than what may be their longest row"
    assert capture.replayed > 2 * capture.recorded
    for mine, theirs in zip(graphed, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(
    "kind", [MeanOverAll, Hidden, OnlyTraining, BestTokens, LargestOrZero, Pairs]
)
def test_a_model_whose_result_depends_on_padding(
    kind: type[Pooled], caplog: pytest.LogCaptureFixture
) -> None:
    """No batch is wrong, although batches with an odd number of columns come last."""
    assert train(kind(), Again()) == train(kind(), None)
    assert "so batches keep their widths" in caplog.text


def test_added_tokens_have_the_label_of_padding() -> None:
    """The loss ignores -1; -100 would be out of bounds."""
    plain, capture = train(Tags(), None, Padded), Again()
    graphed = train(Tags(), capture, Padded)
    assert capture.replayed > 2 * capture.recorded >= 2
    for mine, theirs in zip(graphed, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


def test_a_step_that_reads_beyond_a_table_is_never_run(caplog: pytest.LogCaptureFixture) -> None:
    """On a GPU, it would end the process."""
    plain, graphed = train(LaterPlaces(), None, Short), train(LaterPlaces(), Again(), Short)
    assert "index 56 is out of bounds for size 56" in caplog.text
    for mine, theirs in zip(graphed, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(("value", "fill"), [(-100.0, -100), (-0.5, IGNORED_LABEL)])
def test_labels_of_padding_may_be_numbers_in_bf16(value: float, fill: int) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    labels = torch.full((2, 3), value, dtype=torch.bfloat16)
    assert _find_ignored_label(nn.Linear(1, 1), labels, mask) == fill
