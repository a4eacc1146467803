"""A script of sentence-transformers with its import line changed, beside the original."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers as theirs
import torch
from datasets import Dataset
from sentence_transformers import cross_encoder
from sentence_transformers.sentence_transformer import evaluation
from sentence_transformers.sentence_transformer import losses as their_losses
from sentence_transformers.sentence_transformer.training_args import BatchSamplers
from transformers import BertConfig, BertModel, HfArgumentParser

from rapidformer.dialects import sentence_transformers as ours
from rapidformer.dialects.sentence_transformers import cross_encoder as cross
from rapidformer.errors import ConfigurationError
from tests.dialects.cross_encoder_rig import PAIRS, make_folder
from tests.dialects.cross_encoder_rig import make_rows as make_pairs
from tests.dialects.cross_encoder_rig import run_script as run_cross_encoder
from tests.small import SPECIAL, WORDS, make_tokenizer

TEXTS = ["w1 w2 w3", "w4", "w5 w6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without dropout, which the two draw differently."""
    place = tmp_path_factory.mktemp("bert")
    make_tokenizer().save_pretrained(place)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(SPECIAL + WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(place)
    return place


def make_rows(names: tuple[str, ...], count: int = 16) -> Dataset:
    dice = np.random.default_rng(0)
    columns: dict[str, list[Any]] = {
        name: [" ".join(dice.choice(WORDS, dice.integers(2, 8))) for _ in range(count)]
        for name in names
        if name != "label"
    }
    if "label" in names:
        columns["label"] = dice.random(count).tolist()
    return Dataset.from_dict(columns)


def run_script(system: Any, losses: Any, name: str, folder: Path, output: Path) -> Any:
    """What a script does; returns the losses of its steps, its metrics and its vectors.

    A batch is the whole data: the two shuffle differently.
    """
    model = system.SentenceTransformer(str(folder), device="cpu")
    if system is theirs:
        model.max_seq_length = 64
    pairs = name in ("CoSENTLoss", "CosineSimilarityLoss")
    rows = make_rows(("first", "second", "label") if pairs else ("question", "answer", "wrong"))
    loss = getattr(losses, name.removeprefix("Matryoshka "))(model)
    if name.startswith("Matryoshka"):
        loss = losses.MatryoshkaLoss(model, loss, [16, 8])
    arguments = system.SentenceTransformerTrainingArguments(
        output_dir=str(output), max_steps=3, per_device_train_batch_size=16, learning_rate=0.1,
        optim="sgd", logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    evaluator = evaluation.TripletEvaluator(TEXTS, TEXTS[::-1], TEXTS, name="own")
    trainer = system.SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows, loss=loss,
        evaluator=evaluator,
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    found = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    model.save_pretrained(str(output / "saved"))
    return found, metrics, model.encode(TEXTS)


NAMES = ("Matryoshka MultipleNegativesRankingLoss", "CoSENTLoss")


@pytest.mark.parametrize("name", NAMES)
def test_script_gives_the_same_numbers(name: str, folder: Path, tmp_path: Path) -> None:
    wanted, theirs_metrics, vectors = run_script(
        theirs, their_losses, name, folder, tmp_path / "theirs"
    )
    found, metrics, mine = run_script(ours, ours.losses, name, folder, tmp_path / "ours")
    assert found == pytest.approx(wanted, abs=1e-5)
    np.testing.assert_allclose(mine, vectors, rtol=1e-5, atol=2e-6)
    key = "eval_own_cosine_accuracy"
    assert metrics[key] == pytest.approx(theirs_metrics[key])
    again = theirs.SentenceTransformer(str(tmp_path / "ours" / "saved"), device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), mine, atol=1e-6)


def test_their_own_model_is_trained(folder: Path, tmp_path: Path) -> None:
    model = theirs.SentenceTransformer(str(folder), device="cpu")
    before = model.encode(TEXTS)
    arguments = ours.SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, report_to=[],
        learning_rate=1e-2, batch_sampler="no_duplicates", prompts={"question": "w1 "},
    )  # fmt: skip
    rows = make_rows(("question", "answer"), 8)
    trainer = ours.SentenceTransformerTrainer(
        model, arguments, rows, loss=lambda given: ours.losses.MultipleNegativesRankingLoss(given)
    )
    assert trainer.build_settings().mask_duplicates
    trainer.train()
    assert not np.allclose(model.encode(TEXTS), before)
    saved = theirs.SentenceTransformer(str(tmp_path / "last"), device="cpu")
    np.testing.assert_allclose(saved.encode(TEXTS), model.encode(TEXTS), atol=1e-6)
    assert saved.prompts["query"] == "w1 "
    metrics = trainer.evaluate(make_rows(("question", "answer", "wrong", "worse")))
    assert {"eval_ndcg@10", "eval_triplet_accuracy"} <= metrics.keys()


def test_prompts_may_be_left_out_of_vectors(folder: Path, tmp_path: Path) -> None:
    model = ours.SentenceTransformer(str(folder), device="cpu", prompts={"query": "w9 w8 "})
    model.recipe = replace(model.recipe, pools_prompt=False)
    model.max_seq_length = 5
    model.save_pretrained(tmp_path)
    peer = theirs.SentenceTransformer(str(tmp_path), device="cpu")
    assert peer.max_seq_length == 5
    texts = [*TEXTS, "w1 w2 w3 w4 w5 w6"]
    np.testing.assert_allclose(model.encode_query(texts), peer.encode_query(texts), atol=1e-6)
    again = ours.SentenceTransformer(str(tmp_path), device="cpu")
    np.testing.assert_allclose(again.encode_query(texts), peer.encode_query(texts), atol=1e-6)
    with pytest.raises(ConfigurationError, match="the model's prompts are query"):
        again.encode(texts, prompt_name="qeury")
    assert len(again.encode([])) == 0
    short: dict[str, Any] = {"truncate_dim": 4, "normalize_embeddings": True}
    np.testing.assert_allclose(again.encode(texts, **short), peer.encode(texts, **short), atol=1e-6)


def test_functions_of_losses_may_be_the_defaults() -> None:
    own = their_losses
    ours.losses.TripletLoss(None, own.TripletDistanceMetric.EUCLIDEAN)
    ours.losses.MultipleNegativesRankingLoss(None, 20.0, theirs.util.cos_sim)
    ours.losses.CoSENTLoss(None, 20.0, theirs.util.pairwise_cos_sim)
    ours.losses.MarginMSELoss(None, theirs.util.pairwise_dot_score)
    ours.losses.CosineSimilarityLoss(None, torch.nn.MSELoss(), torch.nn.Identity())
    with pytest.raises(ConfigurationError, match="distances are Euclidean"):
        ours.losses.TripletLoss(None, own.TripletDistanceMetric.COSINE)


@pytest.mark.parametrize(
    "build",
    [ours.SentenceTransformerTrainingArguments, cross.CrossEncoderTrainingArguments],
)
def test_a_command_line_gives_the_same_defaults(build: Any) -> None:
    (parsed,) = HfArgumentParser(build).parse_args_into_dataclasses(["--output_dir", "x"])
    assert parsed.to_dict() == build("x").to_dict()
    assert build("x", batch_sampler=BatchSamplers.NO_DUPLICATES).masks_duplicates


def test_what_is_not_supported_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"distance_metric=...\) is not supported"):
        ours.losses.TripletLoss(None, distance_metric=max)
    with pytest.raises(ConfigurationError, match="batch_sampler='group_by_label'"):
        ours.SentenceTransformerTrainingArguments("out", batch_sampler="group_by_label")
    model = ours.SentenceTransformer(str(folder), device="cpu")
    with pytest.raises(ConfigurationError, match=r"loss=str is not supported: .*losses has Mult"):
        ours.SentenceTransformerTrainer(model, loss="mnrl")
    loss = their_losses.CosineSimilarityLoss(theirs.SentenceTransformer(str(folder), device="cpu"))
    with pytest.raises(ConfigurationError, match="losses: import CosineSimilarityLoss from there"):
        ours.SentenceTransformerTrainer(model, loss=loss)
    with pytest.raises(ConfigurationError, match=r"does not take model_init=...: give it a model"):
        ours.SentenceTransformerTrainer(model_init=lambda: model)
    with pytest.raises(ConfigurationError, match=r"truncate_dim=...\) is not supported: build"):
        ours.SentenceTransformer(str(folder), truncate_dim=8)
    each = ours.SentenceTransformerTrainingArguments("out", eval_strategy="epoch")
    with pytest.raises(ConfigurationError, match="it is asked after each evaluation of rows"):
        ours.SentenceTransformerTrainer(model, each, make_rows(("a", "b")), evaluator=len)
    assert model.encode("w1", precision=None).shape == (16,)
    with pytest.raises(ConfigurationError, match=r"encode\(precision='int8'\) is not supported"):
        model.encode("w1", precision="int8")
    arguments = ours.SentenceTransformerTrainingArguments("out", prompts={"b": "w1 "})
    rows = make_rows(("a", "b", "c"))
    with pytest.raises(ConfigurationError, match="give all but the first the same prompt"):
        ours.SentenceTransformerTrainer(model, arguments, rows)
    scored = ours.SentenceTransformerTrainer(model, train_dataset=make_rows(("a", "b", "label")))
    assert scored.prepared.extras["loss"].name == "cosent"


def test_cross_encoder_gives_the_same_numbers(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    name, weight = "BinaryCrossEntropyLoss", torch.tensor(3.0)
    steps, before, after, *_ = run_cross_encoder(
        cross_encoder, name, folder, tmp_path / "theirs", pos_weight=weight
    )
    found, mine, learnt, model, trainer = run_cross_encoder(
        ours.cross_encoder, name, folder, tmp_path / "ours", pos_weight=weight
    )
    np.testing.assert_allclose(found, steps, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose([mine, learnt], [before, after], atol=1e-6)
    assert np.abs(learnt - mine).max() > 0.01
    assert {"eval_loss", "eval_accuracy"} <= trainer.evaluate().keys()
    model.save_pretrained(tmp_path / "saved")
    trainer.save_model(str(tmp_path / "trainer"))
    for place in ("saved", "trainer"):
        again = theirs.CrossEncoder(str(tmp_path / place), device="cpu")
        np.testing.assert_allclose(again.predict(PAIRS), learnt, atol=1e-6)
    texts = [second for _, second in PAIRS]
    ranked = model.rank("w1 w2", texts, top_k=2, return_documents=True)
    wanted = again.rank("w1 w2", texts, top_k=2, return_documents=True)
    assert [each["text"] for each in ranked] == [each["text"] for each in wanted]


def test_their_own_cross_encoder_is_trained(tmp_path: Path) -> None:
    """Lists of documents; the activation that turns outputs into scores is saved."""
    folder = make_folder(tmp_path / "model")
    model = theirs.CrossEncoder(str(folder), device="cpu", activation_fn=torch.nn.Identity())
    arguments = ours.CrossEncoderTrainingArguments(
        str(tmp_path / "run"), max_steps=1, per_device_train_batch_size=4, report_to=[],
        learning_rate=1e-2,
    )  # fmt: skip
    losses = ours.cross_encoder.losses
    rows = make_pairs("ListNetLoss", 4)
    trainer = ours.CrossEncoderTrainer(model, arguments, rows, loss=losses.ListNetLoss)
    before = model.predict(PAIRS)
    trainer.train()
    assert not np.allclose(model.predict(PAIRS), before)
    last = tmp_path / "run" / "last"
    for library in (theirs, ours):
        again = library.CrossEncoder(str(last), device="cpu")
        np.testing.assert_allclose(again.predict(PAIRS), model.predict(PAIRS), atol=1e-6)
    config = json.loads((last / "config.json").read_text())
    old = config.pop("sentence_transformers")["activation_fn"]
    config["sbert_ce_default_activation_function"] = old  # as before version 4
    (last / "config.json").write_text(json.dumps(config))
    again = ours.CrossEncoder(str(last), device="cpu")
    np.testing.assert_allclose(again.predict(PAIRS), model.predict(PAIRS), atol=1e-6)


def test_what_cross_encoders_do_not_support_is_refused(tmp_path: Path) -> None:
    losses = ours.cross_encoder.losses
    with pytest.raises(ConfigurationError, match=r"losses.LambdaLoss is not supported: use List"):
        _ = losses.LambdaLoss
    with pytest.raises(ConfigurationError, match=r"activation_fn=...\) is not supported"):
        losses.MSELoss(None, torch.nn.Sigmoid())
    with pytest.raises(ConfigurationError, match=r"num_labels=3\) is not supported"):
        ours.CrossEncoder("any", num_labels=3)
    with pytest.raises(ConfigurationError, match="takes a CrossEncoder of a transformer"):
        ours.CrossEncoderTrainer(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigurationError, match="put the prompt into the texts"):
        ours.CrossEncoderTrainingArguments("out", prompts="w1 ")
    model = ours.CrossEncoder(str(make_folder(tmp_path)), device="cpu")
    with pytest.raises(ConfigurationError, match="several train_datasets: join them"):
        ours.CrossEncoderTrainer(model, train_dataset={"a": [], "b": []})
    with pytest.raises(ConfigurationError, match=r"predict\(apply_softmax=True\) is not supported"):
        model.predict(PAIRS, apply_softmax=True, show_progress_bar=True)
    assert model.rank("w1", []) == []
    model.config.num_labels = 3
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="has a head for 3 classes, and a CrossEncoder"):
        ours.CrossEncoder(str(tmp_path))
