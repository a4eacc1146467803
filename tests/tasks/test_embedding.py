"""Embeddings and rerankers: losses and metrics beside sentence-transformers, rows, files."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer import evaluation, losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import Tensor
from torch.nn import functional

from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ConfigurationError, DataError, ModelError
from rapidformer.objectives import BoundObjective, Context
from rapidformer.tasks.embedding.files import Recipe, SentenceFiles, read_recipe
from rapidformer.tasks.embedding.objective import (
    Items,
    LossSettings,
    RerankingObjective,
    compute_losses,
    pool,
)
from rapidformer.tasks.metrics.retrieval import score_ranks
from rapidformer.tasks.registry import get_task

from .conftest import WORDS, build_tokenizer, compute_metrics, make_args, run_split, write_jsonl

TASK, RERANKING = get_task("embedding"), get_task("reranking")
Command = Callable[..., subprocess.CompletedProcess[str]]


def make_rows(count: int = 6, negatives: int = 2) -> list[dict[str, Any]]:
    dice = np.random.default_rng(0)

    def write() -> str:
        return " ".join(dice.choice(WORDS, dice.integers(2, 9)))

    return [
        {"anchor": write(), "positive": write()}
        | {f"negative_{i}": write() for i in range(negatives)}
        for _ in range(count)
    ]


def make_scored_rows(count: int = 6) -> list[dict[str, Any]]:
    scores = [0.1, 0.9, 0.5, 0.5, 0.0, 1.0, 0.3]
    return [
        {"sentence1": row["anchor"], "sentence2": row["positive"], "score": scores[i % 7]}
        for i, row in enumerate(make_rows(count))
    ]


def prepare(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Any:
    args = make_args(pretrained_model_name_or_path=folder, **settings)
    return TASK.prepare(args, {"train": rows, "validation": rows})


# ---- by hand -------------------------------------------------------------------------------------


def make_items(negatives: Tensor | None = None, ids: list[list[int]] | None = None) -> Items:
    """Two queries and documents with the cosines [[.9, .7], [.75, .8]]."""
    queries = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0]], dtype=torch.float64)
    first = torch.tensor([[0.9, 0.05], [0.7, 0.4]], dtype=torch.float64)
    documents = torch.cat([first, (1 - first.square().sum(1, keepdim=True)).sqrt()], dim=1)
    vectors = torch.stack([queries, documents], dim=1)
    if negatives is not None:
        vectors = torch.cat([vectors, negatives], dim=1)
    given = torch.arange(vectors.shape[:2].numel()).view(vectors.shape[:2])
    numbers = given if ids is None else torch.tensor(ids)
    return Items(vectors, torch.ones_like(numbers, dtype=torch.bool), numbers)


def test_infonce_by_hand() -> None:
    values, _ = compute_losses(make_items(), LossSettings(name="infonce"))
    assert values.tolist() == pytest.approx([0.0181499279, 0.3132616875], abs=1e-10)
    assert float(values.mean()) == pytest.approx(0.1657058077, abs=1e-10)
    both, _ = compute_losses(make_items(), LossSettings(name="infonce", is_symmetric=True))
    assert float(both.mean()) == pytest.approx(0.1267317445, abs=1e-10)


@pytest.mark.parametrize("ids", [[[0, 5], [1, 5]], [[0, 5], [0, 6]]], ids=["document", "query"])
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_equal_texts_are_no_negatives(ids: list[list[int]], is_symmetric: bool) -> None:
    settings = LossSettings(name="infonce", is_symmetric=is_symmetric)
    values, _ = compute_losses(make_items(ids=ids), settings)
    assert values.tolist() == pytest.approx([0.0, 0.0], abs=1e-12)
    kept = LossSettings(name="infonce", is_symmetric=is_symmetric, masks_duplicates=False)
    assert compute_losses(make_items(ids=ids), kept)[0].min() > 0.01


def test_other_losses_by_hand() -> None:
    items = Items(*vars(make_items()).values())
    scored = Items(items.vectors, items.is_present, items.text_ids, torch.tensor([[0.2], [0.9]]))
    # One pair of items in the wrong order: their cosines are .9 and .8.
    cosent, _ = compute_losses(scored, LossSettings(name="cosent"))
    assert cosent.tolist() == pytest.approx([math.log(1 + math.exp(20 * 0.1))] * 2)
    cosine, _ = compute_losses(scored, LossSettings(name="cosine"))
    assert cosine.tolist() == pytest.approx([0.49, 0.01])


def test_triplets_are_counted_one_by_one() -> None:
    """One query has two negatives, the other one: three triplets, not a mean of two means."""
    negatives = torch.eye(3, dtype=torch.float64)[None, :2].repeat(2, 1, 1)
    items = make_items(negatives)
    items.is_present[1, 3] = False
    values, counts = compute_losses(items, LossSettings(name="triplet", margin=1.0))
    assert counts.tolist() == [2, 1]
    distances = (items.vectors[:, :1] - items.vectors[:, 1:]).norm(dim=-1)
    expected = (distances[:, :1] - distances[:, 1:] + 1).relu()
    assert values.tolist() == pytest.approx([float(expected[0].sum()), float(expected[1, 0])])


@pytest.mark.parametrize("side", ["left", "right"])
def test_pooling_reads_no_padding(side: str) -> None:
    hidden, mask = torch.arange(12.0).view(2, 3, 2), torch.tensor([[1, 1, 1], [1, 1, 0]])
    mask = mask if side == "right" else mask.flip(1)
    hidden = hidden.masked_fill(mask[..., None] == 0, torch.nan)
    rows = [hidden[0], hidden[1][mask[1] > 0]]
    for name, expected in (
        ("mean", [row.mean(0) for row in rows]), ("first", [row[0] for row in rows]),
        ("last", [row[-1] for row in rows]),
    ):  # fmt: skip
        assert torch.equal(pool(hidden, mask, name), torch.stack(expected)), name


def test_ranks_by_hand() -> None:
    scores = score_ranks([[0], [3, 11], [200]])
    assert scores["accuracy@1"] == pytest.approx(1 / 3)
    assert scores["accuracy@5"] == pytest.approx(2 / 3)
    assert scores["recall@5"] == pytest.approx((1 + 0.5) / 3)
    assert scores["mrr@10"] == pytest.approx((1 + 1 / 4) / 3)
    best = 1 + 1 / math.log2(3)
    assert scores["ndcg@10"] == pytest.approx((1 + (1 / math.log2(5)) / best) / 3)
    assert scores["map@100"] == pytest.approx((1 + (1 / 4 + 2 / 12) / 2) / 3)


# ---- beside sentence-transformers ----------------------------------------------------------------


@pytest.fixture(scope="module")
def peer(bert_folder: Path) -> SentenceTransformer:
    torch.manual_seed(0)
    transformer = Transformer(str(bert_folder))
    modules = [transformer, Pooling(16, "mean")]
    return SentenceTransformer(modules=modules, device="cpu").eval().double()


def _take_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    taken = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return taken


def _compare(prepared: Any, theirs: Any, model: Any) -> None:
    """One batch of all rows, its loss and gradients."""
    batch = prepared.collate(list(prepared.train))
    ours = prepared.objective.compute(model, batch, Context()).mean
    theirs.backward()
    expected = _take_gradients(model)
    ours.backward()
    found = _take_gradients(model)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-7)
    assert found.keys() == expected.keys()
    scale = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= 1e-7 * scale, name


MATRYOSHKA = {"matryoshka_dims": [16, 8, 4]}
CASES: list[tuple[str, Callable[[Any], Any], dict[str, Any], int]] = [
    ("MNRL", losses.MultipleNegativesRankingLoss, {}, 0),
    ("MNRL, 2 negatives", losses.MultipleNegativesRankingLoss, {}, 2),
    ("MNRL, scale", lambda m: losses.MultipleNegativesRankingLoss(m, scale=5.0),
     {"similarity_scale": 5.0}, 1),
    ("symmetric", losses.MultipleNegativesSymmetricRankingLoss, {"symmetric": True}, 1),
    ("matryoshka",
     lambda m: losses.MatryoshkaLoss(m, losses.MultipleNegativesRankingLoss(m), [16, 8, 4]),
     MATRYOSHKA, 1),
    ("triplet", losses.TripletLoss, {"loss": "triplet"}, 1),
    ("triplet, matryoshka", lambda m: losses.MatryoshkaLoss(m, losses.TripletLoss(m), [16, 8, 4]),
     {"loss": "triplet", **MATRYOSHKA}, 1),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_losses_of_documents(case: Any, peer: SentenceTransformer, bert_folder: Path) -> None:
    _, build, settings, negatives = case
    rows = make_rows(negatives=negatives)
    prepared = prepare(bert_folder, rows, **settings)
    columns = [peer.tokenize([row[name] for row in rows]) for name in rows[0]]
    _compare(prepared, build(peer)(columns, torch.zeros(0)), peer[0].model)


def _squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(outputs, labels.to(outputs.dtype))


@pytest.mark.parametrize("name", ["cosent", "cosine"])
def test_losses_of_scores(name: str, peer: SentenceTransformer, bert_folder: Path) -> None:
    rows = make_scored_rows()
    prepared = prepare(bert_folder, rows, loss=name)
    columns = [peer.tokenize([row[key] for row in rows]) for key in ("sentence1", "sentence2")]
    if name == "cosent":
        loss = losses.CoSENTLoss(peer)
    else:  # it rounds its labels to fp32, which torch 2.11 does not compare with fp64
        loss = losses.CosineSimilarityLoss(peer, loss_fct=_squared_error)
    theirs = loss(columns, torch.tensor([row["score"] for row in rows], dtype=torch.float64))
    _compare(prepared, theirs, peer[0].model)


@pytest.mark.parametrize("kind", ["margin", "margins", "scores"])
def test_margins(kind: str, peer: SentenceTransformer, bert_folder: Path) -> None:
    count = 1 if kind == "margin" else 2
    rows = make_rows(negatives=count)
    labels = np.random.default_rng(1).random((len(rows), count + (kind == "scores"))).tolist()
    for row, values in zip(rows, labels, strict=True):
        row["score"] = values[0] if kind == "margin" else values
    names = [name for name in rows[0] if name != "score"]
    columns = [peer.tokenize([row[name] for row in rows]) for name in names]
    theirs = losses.MarginMSELoss(peer)(
        columns, torch.tensor([row["score"] for row in rows], dtype=torch.float64)
    )
    _compare(prepare(bert_folder, rows), theirs, peer[0].model)


def test_reranking_losses(bert_folder: Path) -> None:
    torch.manual_seed(0)
    peer = CrossEncoder(str(bert_folder), num_labels=1, device="cpu").eval().double()
    rows = [
        {"query": row["anchor"], "document": row["positive"], "label": i % 2}
        for i, row in enumerate(make_rows())
    ]
    args = make_args(pretrained_model_name_or_path=bert_folder, task="reranking")
    prepared = RERANKING.prepare(args, {"train": rows})
    columns = [[row["query"] for row in rows], [row["document"] for row in rows]]
    theirs = BinaryCrossEntropyLoss(peer)(columns, torch.tensor([row["label"] for row in rows]))
    _compare(prepared, theirs, peer[0].model)


def test_ranking_losses_by_hand() -> None:
    """Three documents and two; what a row does not have counts nowhere."""
    logits = torch.tensor([[1.0, 0.0, 3.0], [2.0, -1.0, 9.0]], requires_grad=True)
    batch = {"slots": torch.tensor([[0, 1, 2], [3, 4, -1]])}

    def compare(name: str, scores: list[list[float]], weight: float = 1.0) -> tuple[float, float]:
        batch["scores"] = torch.tensor(scores)
        losses, counts = RerankingObjective(name, weight).compare(logits, batch)
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        assert gradient.isfinite().all() and gradient[1, 2] == 0
        return losses.sum().item(), counts.sum().item()

    nothing = math.nan
    wanted = 4 * math.log1p(math.exp(-2)) + math.log1p(math.exp(-1)) * 5
    wanted += math.log(2) + math.log1p(math.exp(3))  # the others, of which none fits
    labels = [[1.0, 0.0, 0.0], [1.0, 0.0, nothing]]
    found = compare("bce", labels, weight=4.0)
    assert found == pytest.approx((wanted, 5))
    assert compare("mse", [[1.5, 0.0, 2.0], [0.0, 1.0, nothing]]) == pytest.approx((9.25, 5))
    assert compare("margin_mse", [[0.0, -1.0], [1.0, nothing]]) == pytest.approx((6.0, 3))
    shares = torch.tensor([1.0, 3.0]).softmax(0)
    second = -(shares * torch.tensor([2.0, -1.0]).log_softmax(0)).sum()
    first = -torch.tensor([1.0, 0.0, 3.0]).log_softmax(0).mean()
    expected = (float(first + second), 2)
    assert compare("listnet", [[7.0] * 3, [1.0, 3.0, nothing]]) == pytest.approx(expected)


def test_listwise_by_hand(bert_folder: Path) -> None:
    """Lists of unequal length: logsumexp of a row's own scores less that of its positive."""
    first, second = make_rows(2)
    rows = [
        {"query": first["anchor"], "positive": first["positive"],
         "negatives": [first["negative_0"], first["negative_1"]]},
        {"query": second["anchor"], "positive": second["positive"],
         "negatives": [second["negative_0"]]},
    ]  # fmt: skip
    args = make_args(pretrained_model_name_or_path=bert_folder, task="reranking", loss="listwise")
    prepared = RERANKING.prepare(args, {"train": rows})
    model = RERANKING.build_model(args, prepared).eval()
    batch = prepared.collate(list(prepared.train))
    inputs = {n: batch[n] for n in ("input_ids", "token_type_ids", "attention_mask")}
    a, b = model(**inputs).logits[:, 0].split([3, 2])
    expected = (a.logsumexp(0) - a[0] + b.logsumexp(0) - b[0]) / 2
    assert prepared.objective is not None
    term: Any = prepared.objective.compute(model, batch, Context())
    assert term.mean.item() == pytest.approx(expected.item(), rel=1e-6)


def test_evaluators(peer: SentenceTransformer, bert_folder: Path) -> None:
    """Retrieval with equal queries and documents, triplets, and correlations."""
    rows = make_rows(20, negatives=1)
    rows[3]["anchor"] = rows[5]["anchor"]
    rows[7]["positive"] = rows[9]["positive"]
    rows[11]["negative_0"] = rows[2]["positive"]
    found = _measure(prepare(bert_folder, rows), peer)
    documents = dict.fromkeys(text for row in rows for text in (row["positive"], row["negative_0"]))
    corpus = {f"d{number:03}": text for number, text in enumerate(documents)}
    names = {text: name for name, text in corpus.items()}
    queries = {f"q{i}": text for i, text in enumerate(dict.fromkeys(r["anchor"] for r in rows))}
    relevant = {
        name: {names[row["positive"]] for row in rows if row["anchor"] == text}
        for name, text in queries.items()
    }
    theirs = evaluation.InformationRetrievalEvaluator(queries, corpus, relevant)(peer)
    theirs = {name: value for name, value in theirs.items() if "precision" not in name}
    for name, value in theirs.items():
        assert found[name.removeprefix("cosine_")] == pytest.approx(value, abs=1e-9), name
    columns = [[row[name] for row in rows] for name in ("anchor", "positive", "negative_0")]
    triplets = evaluation.TripletEvaluator(*columns)(peer)
    assert found["triplet_accuracy"] == pytest.approx(triplets["cosine_accuracy"])
    scored = make_scored_rows(7)
    found = _measure(prepare(bert_folder, scored), peer)
    columns = [[row[name] for row in scored] for name in ("sentence1", "sentence2", "score")]
    theirs = evaluation.EmbeddingSimilarityEvaluator(*columns)(peer)
    assert found["spearmanr"] == pytest.approx(theirs["spearman_cosine"], abs=1e-6)
    assert found["pearson"] == pytest.approx(theirs["pearson_cosine"], abs=1e-5)


def _measure(prepared: Any, peer: SentenceTransformer) -> dict[str, float]:
    records = run_split(TASK, peer[0].model, prepared, "validation")
    return compute_metrics(TASK, records, prepared, "validation")


# ---- the whole update ----------------------------------------------------------------------------


def run_update(prepared: Any, dropout: float = 0.0, **cut: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of one update."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=200, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    settings = {"save": "none", "lr": 0.1, "clip_grad": 0.0, "log_level": "error", **cut}
    engine = RapidformerEngine(args=settings)
    loader = engine.data.build_loader(
        prepared.train, prepared.collate, shuffle=False, is_training=True
    )
    model, *_ = engine.compose(BertModel(config, add_pooling_layer=False))
    update = next(engine.data.iterate_updates(loader))
    results = engine.run_update(BoundObjective(prepared.objective, model), update)
    total = sum(float(each.loss) * float(each.weight) for each in results)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return total / sum(float(each.weight) for each in results), gradients


@pytest.mark.parametrize("loss", ["infonce", "cosent", "triplet"])
def test_loss_is_that_of_the_global_batch(loss: str, bert_folder: Path) -> None:
    """Whole, one row at a time, with a smaller last micro-batch; negatives of unequal number."""
    rows = make_scored_rows(7) if loss == "cosent" else make_rows(7)
    if loss != "cosent":
        rows[1]["negative_1"] = rows[4]["negative_1"] = None
    prepared = prepare(bert_folder, rows, loss=loss)
    whole, gradients = run_update(prepared, micro_batch_size=7, global_batch_size=7)
    scale = max(float(gradient.norm()) for gradient in gradients.values())
    for size, batch in ((1, 7), (2, 8)):
        value, found = run_update(prepared, micro_batch_size=size, global_batch_size=batch)
        assert value == pytest.approx(whole, rel=1e-6)
        for name, gradient in gradients.items():
            assert float((found[name] - gradient).norm()) < 2e-6 * scale, name
    if loss == "infonce":
        apart = prepare(bert_folder, rows, negatives="micro-batch")
        assert run_update(apart, micro_batch_size=2, global_batch_size=8)[0] < whole - 0.1


def test_both_passes_draw_the_same_dropout(bert_folder: Path) -> None:
    """Without padding, too: batches run unpadded here."""
    prepared = prepare(bert_folder, make_rows(4))
    seen: list[Tensor] = []
    embed = prepared.objective.embed

    def watch(model: Any, batch: Any) -> Items:
        items: Items = embed(model, batch)
        seen.append(items.vectors.detach())
        return items

    prepared.objective.embed = watch
    run_update(prepared, dropout=0.5, micro_batch_size=2, global_batch_size=4)
    assert len(seen) == 4
    assert torch.equal(torch.cat(seen[:2]), torch.cat(seen[2:]))


# ---- rows ----------------------------------------------------------------------------------------

GOOD = {"query": "who", "positive": "john", "negative": "cat"}
SCORED = {"sentence1": "a", "sentence2": "b", "score": 0.5}
MESSAGE = [{"role": "user", "content": "who runs ?"}]
FORMATS: list[tuple[str, dict[str, Any], list[list[str]], str]] = [
    ("names", {"query": "who", "pos": "john", "neg": ["mary", "cat"]},
     [["who", "john", "mary", "cat"]], "infonce"),
    ("numbered", {"negative_2": "b", "anchor": "q", "positive": "p", "negative_1": "a"},
     [["q", "p", "b", "a"]], "infonce"),
    ("lists of documents", {"query": "who", "pos_doc": ["john", "mary"], "neg_doc": ["cat"]},
     [["who", "john", "cat"], ["who", "mary", "cat"]], "infonce"),
    ("order", {"first": "q", "second": "p", "third": "n"}, [["q", "p", "n"]], "infonce"),
    ("scores", {"sentence1": "a", "sentence2": "b", "score": 0.5}, [["a", "b"]], "cosent"),
    ("labels", {"text_a": "a", "text_b": "b", "label": 1}, [["a", "b"]], "cosent"),
    ("margins", {"query": "q", "positive": "p", "negative": "n", "score": 1.5},
     [["q", "p", "n"]], "margin_mse"),
    ("messages", {"messages": MESSAGE, "positive_messages": [MESSAGE], "negative_messages": []},
     [["who runs?", "who runs?"]], "infonce"),
]  # fmt: skip


def test_only_what_the_loss_learns_from_is_read(bert_folder: Path) -> None:
    """Scores are no part of a ranking, which has its own metrics, nor negatives of scored pairs."""
    scored = {"query": "who", "documents": ["john", "mary"], "scores": [0.5, 1.0]}
    ranked = prepare(bert_folder, [scored], loss="infonce")
    assert [len(item["input_ids"]) for item in ranked.train] == [2, 2]
    assert not any(item["scores"] for item in ranked.train)
    pairs = prepare(bert_folder, [{**GOOD, "score": 0.5}], loss="cosent")
    assert [len(item["input_ids"]) for item in pairs.train] == [2]


@pytest.mark.parametrize("case", FORMATS, ids=[case[0] for case in FORMATS])
def test_row_formats(case: Any, bert_folder: Path) -> None:
    _, row, expected, loss = case
    prepared = prepare(bert_folder, [row])
    read = prepared.processor.batch_decode
    texts = [read(item["input_ids"], skip_special_tokens=True) for item in prepared.train]
    assert texts == expected
    assert prepared.extras["loss"].name == loss


BAD: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([GOOD, {**GOOD, "positive": None}], {},
     "train, row 2: the column positive must hold text, not nothing."),
    ([GOOD, {**GOOD, "positive": []}], {}, "train, row 2: the column positive has no text."),
    ([GOOD, {**GOOD, "query": "  "}], {}, "train, row 2: the column query has an empty text."),
    ([GOOD, {**GOOD, "query": ["a", "b"]}], {},
     "train, row 2: the column query must hold one text, not 2."),
    ([SCORED, {**SCORED, "score": "high"}], {},
     "train, row 2: the column score must hold a number, but holds 'high'."),
    ([SCORED, {**SCORED, "score": None}], {}, "train, row 2: the column score must hold a number"),
    ([SCORED, {**SCORED, "score": 3}], {"loss": "cosine"}, "train, row 2 has the score 3, and a"),
    ([GOOD, {**GOOD, "negative": None}], {"loss": "triplet"}, "train, row 2 has no negative"),
    ([{**GOOD, "negative": ["a", "b"], "score": 1.0}], {}, "row 1 has one score for 2 negatives"),
    ([{**GOOD, "score": [1.0, 2.0, 3.0]}], {}, "row 1: the column score has 3 numbers for 2"),
    ([GOOD], {"loss": "cosent"}, "--loss cosent needs scores: name their column with --label"),
    ([SCORED], {"loss": "triplet"}, "--loss triplet needs negatives: name their columns with"),
    ([GOOD], {"loss": "dpo"}, "--loss dpo: --task embedding has infonce, cosent, cosine"),
    ([GOOD], {"matryoshka_dims": [32]}, "--matryoshka-dims 32: the model's vectors have 16"),
    ([{"id": 1, "query": "a"}], {}, "No column with a text that fits the query"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "settings", "text"), BAD)
def test_bad_rows(rows: Any, settings: Any, text: str, bert_folder: Path) -> None:
    with pytest.raises((DataError, ConfigurationError)) as failure:
        prepare(bert_folder, rows, **settings)
    assert text in str(failure.value)


def test_bad_rows_of_rerankers(bert_folder: Path) -> None:
    args = make_args(pretrained_model_name_or_path=bert_folder, task="reranking", loss="listwise")
    lone = {"query": "a", "document": "b", "label": 1}
    with pytest.raises(DataError, match="train, row 1 has one document alone: --loss listwise"):
        RERANKING.prepare(args, {"train": [lone]})
    args.loss = None
    with pytest.raises(DataError, match="train, row 2 has the score 2: it must be from 0 to 1"):
        RERANKING.prepare(args, {"train": [lone, {**lone, "label": 2}]})


def test_a_model_brings_its_recipe(
    bert_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also its length, and from the Hub; --pooling replaces one that is not known."""
    recipe = Recipe(pooling="last", prompts={"query": "who "}, pools_prompt=False, length=8)
    SentenceFiles(build_tokenizer(tmp_path), recipe, 16).save_pretrained(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: str(tmp_path))
    assert read_recipe("org/name") == dataclasses.replace(recipe, normalizes=False)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(bert_folder / name, tmp_path)
    long = {"query": "the cat " * 9, "positive": "the dog " * 9}
    prepared = prepare(tmp_path, [long])
    assert [len(ids) for ids in prepared.train[0]["input_ids"]] == [8, 8]
    assert prepared.train[0]["prompts"] == [2, 0] and prepared.saved.recipe.pooling == "last"
    pooling = tmp_path / "1_Pooling" / "config.json"
    pooling.write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ModelError, match="choose one of them with --pooling"):
        prepare(tmp_path, [long])
    assert prepare(tmp_path, [long], pooling="first").saved.recipe.pooling == "first"


def test_encoder_decoders_are_refused(t5_folder: Path) -> None:
    with pytest.raises(ModelError, match="needs an encoder or a decoder, and t5 is both"):
        prepare(t5_folder, make_rows())


# ---- the command ---------------------------------------------------------------------------------


def _train(command: Command, task: str, model: Path, data: Path, *more: Any) -> Path:
    folder = data.parent / "run"
    done = command(
        "--task", task, "--pretrained-model-name-or-path", model, "--data-path", data,
        "--validation-split", 0.25, "--train-iters", 4, "--micro-batch-size", 2,
        "--global-batch-size", 6, "--lr", 0.01, "--save", folder, *more,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_folder_is_one_of_sentence_transformers(
    command: Command, bert_folder: Path, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", make_rows(24))
    run = _train(
        command, "embedding", bert_folder, data, "--query-prompt", "question : ", "--pooling",
        "first",
    )  # fmt: skip
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"eval_ndcg@10", "eval_mrr@10", "eval_map@100"} <= set().union(*lines)
    done = command("evaluate", "--load", run, "--output", tmp_path / "evaluation.json")
    assert done.returncode == 0, done.stderr
    done = command("export", run, tmp_path / "export", "--no-verify")
    assert done.returncode == 0, done.stderr
    texts = ["the cat sat", "john lives in paris"]
    for folder, column in ((run / "best", "query"), (tmp_path / "export", "document")):
        peer = SentenceTransformer(str(folder), device="cpu")
        assert peer.prompts["query"] == "question : "
        assert type(peer[2]).__name__ == "Normalize"
        rows = [json.dumps({column: text}) for text in texts]
        done = command("predict", "--load", folder, "--input", *rows)
        assert done.returncode == 0, done.stderr
        ours = [json.loads(line)["embedding"] for line in done.stdout.splitlines()]
        np.testing.assert_allclose(ours, getattr(peer, f"encode_{column}")(texts), atol=1e-6)


def test_adapter_folder_is_one_of_sentence_transformers(
    command: Command, bert_folder: Path, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", make_rows(16))
    run = _train(command, "embedding", bert_folder, data, "--lora-rank", 2, "--no-pool-prompt",
                 "--document-prompt", "text : ")  # fmt: skip
    assert (run / "best" / "adapter_config.json").is_file()
    done = command("predict", "--load", run, "--input", '{"document": "the cat sat"}')
    assert done.returncode == 0, done.stderr
    ours = json.loads(done.stdout)["embedding"]
    peer = SentenceTransformer(str(run / "best"), device="cpu")
    np.testing.assert_allclose(ours, peer.encode_document("the cat sat"), atol=1e-6)


def test_reranker_is_a_cross_encoder(command: Command, bert_folder: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", make_rows(24))
    run = _train(command, "reranking", bert_folder, data, "--loss", "listwise")
    pairs = [("the cat", "sat on a mat"), ("who runs ?", "john")]
    peer = CrossEncoder(str(run / "best"), device="cpu")
    rows = [json.dumps({"query": query, "document": text}) for query, text in pairs]
    done = command("predict", "--load", run, "--input", *rows)
    assert done.returncode == 0, done.stderr
    ours = [json.loads(line)["score"] for line in done.stdout.splitlines()]
    np.testing.assert_allclose(ours, peer.predict(pairs), atol=1e-6)
    assert command("evaluate", "--load", run).returncode == 0


def test_models_of_other_tasks(command: Command, small_model: Path) -> None:
    """Every encoder has vectors; a classifier is no reranker."""
    row = '{"query": "w1 w2", "document": ["w3", "w1 w2"]}'
    done = command("predict", "--task", "embedding", "--load", small_model, "--input", row)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["similarity"]
    assert first < second == 1.0
    ask = ("predict", "--task", "reranking", "--load", small_model, "--input", row)
    refused = command(*ask)
    assert refused.returncode == 1
    assert "was never trained for this task" in refused.stderr
    done = command(*ask, "--allow-untrained")
    assert len(json.loads(done.stdout)["scores"]) == 2, done.stderr


def test_rows_are_shown(command: Command, bert_folder: Path, tmp_path: Path) -> None:
    row = {**make_rows(1)[0], "score": [0.5, 0.25]}
    data = write_jsonl(tmp_path / "train.jsonl", [row])
    done = command("data", "show", "--task", "embedding", "--data-path", data,
                   "--pretrained-model-name-or-path", bert_folder)  # fmt: skip
    assert done.returncode == 0, done.stderr
    for text in ("query", "positive", "negative 1", "negative 2", "score: 0.5, 0.25"):
        assert f"\n{text}\n" in f"{done.stdout}\n", done.stdout
