"""``--task pretraining`` as a user types it: every kind of model, evaluation, length, errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.pretraining.corpus import BERT_SPECIAL, LENGTH, SIZES, get_losses, read_metrics

pytestmark = pytest.mark.slow


def start(command: Any, corpus: list[object], *words: object) -> Any:
    return command("--task", "pretraining", *SIZES, *LENGTH, *corpus, *words)


DECODERS = [("gpt", "GPTModel"), ("gpt2", "GPT2LMHeadModel"), ("llama", "LlamaForCausalLM")]
ENCODERS = [
    ("bert", "BertForPreTraining"),
    ("roberta", "RobertaForMaskedLM"),
    ("albert", "AlbertForPreTraining"),
]


@pytest.mark.parametrize(("kind", "model"), DECODERS)
def test_decoders_learn_next_tokens(
    kind: str, model: str, command: Any, gpt_corpus: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = start(command, gpt_corpus, "--model-type", kind, "--save", run)
    assert done.returncode == 0, done.stderr
    assert f"model     {model}" in done.stderr
    losses = get_losses(run)
    assert len(losses) == 4
    assert losses[0] == pytest.approx(math.log(257), rel=0.1)
    assert losses[-1] < losses[0]
    line = read_metrics(run)[-1]
    assert line["test_perplexity"] == pytest.approx(math.exp(line["test_loss"]))
    assert [x["step"] for x in read_metrics(run) if "eval_loss" in x] == [2, 4]
    tokens = [x["tokens_per_second"] / x["samples_per_second"] for x in read_metrics(run)[:1]]
    assert tokens == pytest.approx([24])


@pytest.mark.parametrize(("kind", "model"), ENCODERS)
def test_encoders_learn_hidden_tokens(
    kind: str, model: str, command: Any, bert_corpus: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = start(command, bert_corpus, "--model-type", kind, "--save", run)
    assert done.returncode == 0, done.stderr
    assert f"model     {model}" in done.stderr
    line = read_metrics(run)[-1]
    if kind == "roberta":
        assert "test_sop_loss" not in line
        words = line["test_loss"]
    else:
        words = line["test_lm_loss"]
        assert line["test_loss"] == pytest.approx(words + line["test_sop_loss"])
    assert line["test_perplexity"] == pytest.approx(math.exp(words)), "of the words alone"


def test_encoder_decoder_learns_hidden_spans(
    command: Any, bert_corpus: list[object], tmp_path: Path
) -> None:
    done = start(command, bert_corpus, "--model-type", "t5")
    assert "no sentinels for T5's spans: give --vocab-extra-ids" in done.stderr
    words = ["--model-type", "t5", "--vocab-extra-ids", 20, "--save", tmp_path / "run"]
    done = start(command, bert_corpus, *words)
    assert done.returncode == 0, done.stderr
    losses = get_losses(tmp_path / "run")
    assert losses[-1] < losses[0]
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "last")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "last")
    sentinel = tokenizer.convert_tokens_to_ids("<extra_id_0>")
    assert sentinel == 5 + 70 + 2, "after BERT's tokens and Megatron's two"
    assert model.config.vocab_size == 128, "padded"
    assert model.config.decoder_start_token_id == model.config.pad_token_id == 0
    assert tokenizer.eos_token_id == model.config.eos_token_id == 5 + 70 + 1
    words = ["--pretrained-model-name-or-path", tmp_path / "run" / "last", "--train-iters", 1]
    done = start(command, bert_corpus[:2], *words, "--eval-iters", 0)
    assert done.returncode == 0, "the folder's own tokenizer has all that is needed" + done.stderr


def test_experts_show_their_balance(command: Any, gpt_corpus: list[object], tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--model-type", "gpt", "--num-experts", 4, "--moe-loss-coeff", 0.1, "--save", run]
    done = start(command, gpt_corpus, *words)
    assert done.returncode == 0, done.stderr
    for line in read_metrics(run)[:2]:
        assert line["loss"] == pytest.approx(line["lm_loss"] + 0.1 * line["moe_loss"])
        assert 1.9 < line["moe_loss"] < 4, "two mixtures, near balance at the start"


def test_a_pretrained_folder_is_gone_on_with(
    command: Any, gpt_corpus: list[object], bert_corpus: list[object], tmp_path: Path
) -> None:
    """Also one whose vocabulary is exactly the file's, as published BERTs' are."""
    for corpus, kind, extra in (
        (gpt_corpus, "gpt", []),
        (bert_corpus, "bert", ["--vocab-size", 77]),
    ):
        first, second = tmp_path / kind, tmp_path / f"{kind}-2"
        done = start(command, corpus, "--model-type", kind, "--save", first, *extra)
        assert done.returncode == 0, done.stderr
        folder = first / "last"
        done = start(
            command, corpus, "--pretrained-model-name-or-path", folder, "--save", second,
            "--hidden-dropout", 0, "--attention-dropout", 0,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert get_losses(second)[0] < get_losses(first)[0]


def test_size_that_contradicts_the_folder_is_refused(
    command: Any, bert_corpus: list[object], tmp_path: Path
) -> None:
    start(command, bert_corpus, "--model-type", "bert", "--save", tmp_path / "run")
    folder = tmp_path / "run" / "last"
    words = ["--pretrained-model-name-or-path", folder, "--num-layers", 3]
    done = start(command, bert_corpus, *words)
    assert "--num-layers 3 contradicts" in done.stderr
    done = start(command, bert_corpus, *words, "--from-scratch")
    assert done.returncode == 0, done.stderr


def test_evaluate_gives_the_runs_own_numbers(
    command: Any, gpt_corpus: list[object], tmp_path: Path
) -> None:
    import json

    run = tmp_path / "run"
    start(command, gpt_corpus, "--model-type", "gpt2", "--save", run)
    measured = {}
    for split in ("validation", "test"):
        done = command(
            "evaluate", "--task", "pretraining", "--load", run / "last", *gpt_corpus, *LENGTH,
            "--seq-length", 24, "--eval-split", split,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        measured[split] = json.loads(done.stdout)
        assert measured[split]["split"] == split
    assert measured["test"]["loss"] == pytest.approx(get_losses(run, "test_loss")[-1], rel=1e-5)
    assert measured["validation"]["loss"] == pytest.approx(get_losses(run, "eval_loss")[-1])
    done = command(
        "evaluate", "--task", "pretraining", "--load", run, *gpt_corpus, "--seq-length", 24,
        "--split", "980,20", "--eval-split", "test",
    )  # fmt: skip
    assert "--split '980,20' leaves none for it" in done.stderr
    done = command(
        "evaluate", "--task", "pretraining", "--load", run, *gpt_corpus, "--seq-length", 24,
        "--split", "80,10,10", "--eval-iters", 1,
    )  # fmt: skip
    assert done.returncode == 0, "without a run's length" + done.stderr


def test_pretrained_gpt_writes_text(command: Any, gpt_corpus: list[object], tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(command, gpt_corpus, "--model-type", "gpt", "--save", run)
    words = ["--load", run / "last", "--input", "abc", "--max-new-tokens", 4]
    done = command("predict", "--task", "causal_lm", *words)
    assert done.returncode == 0, done.stderr
    assert '"abc' in done.stdout or "text" in done.stdout
    done = command("predict", "--task", "pretraining", *words)
    assert "to use a pre-trained model, run `rapidformer predict --task causal_lm`" in done.stderr


def test_length_in_tokens_and_a_growing_batch(
    command: Any, gpt_corpus: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = command(
        "--task", "pretraining", "--model-type", "gpt", *SIZES, *gpt_corpus,
        "--micro-batch-size", 4, "--global-batch-size", 12, "--rampup-batch-size", 4, 4, 16,
        "--train-tokens", 24 * 50, "--lr", "5e-3", "--split", "80,10,10", "--log-interval", 1,
        "--eval-iters", 0, "--save", run,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in read_metrics(run) if "loss" in line]
    sizes = [round(x["samples_per_second"] * x["step_time"]) for x in lines]
    assert sizes == [4, 4, 8, 12, 12, 12], "at least 50 samples"


def test_it_stops_after_the_given_minutes_and_resumes(
    command: Any, gpt_corpus: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ["--model-type", "gpt", "--save", run]
    done = start(command, gpt_corpus, *words, "--exit-duration-in-mins", 0)
    assert done.returncode == 0, done.stderr
    assert len(get_losses(run)) == 1
    assert "test_loss" not in read_metrics(run)[-1], "the run is not over"
    done = start(command, gpt_corpus, *words, "--load", run)
    assert done.returncode == 0, done.stderr
    assert [x["step"] for x in read_metrics(run) if "loss" in x] == [1, 2, 3, 4]


def test_test_data_is_measured_after_the_last_line_of_training(
    command: Any, gpt_corpus: list[object], tmp_path: Path
) -> None:
    """Or that line would count the time as training; here no validation comes in between."""
    run = tmp_path / "run"
    words = ["--model-type", "gpt", "--split", "80,0,20", "--log-interval", 3, "--save", run]
    assert start(command, gpt_corpus, *words).returncode == 0
    lines = [(line["step"], "test_loss" in line) for line in read_metrics(run)]
    assert lines == [(1, False), (3, False), (4, False), (4, True)]


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (
            ["--model-type", "gpt"],
            ["--task pretraining needs --seq-length", "--task pretraining needs --data-path"],
        ),
        (
            ["--model-type", "gpt", "--seq-length", 8, "--data-path", "nowhere/at_all"],
            ["give the length of training", "needs --lr"],
        ),
        (
            [
                "--model-type",
                "gpt",
                "--seq-length",
                8,
                "--data-path",
                "x",
                "--train-data-path",
                "y",
            ],
            ["--data-path and --train-data-path exclude each other"],
        ),
    ],
)
def test_what_is_missing_is_said_at_once(
    words: list[object], messages: list[str], command: Any
) -> None:
    done = command("--task", "pretraining", *words)
    assert done.returncode == 1
    for message in messages:
        assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_files_that_are_not_there(command: Any, gpt_corpus: list[object]) -> None:
    done = start(command, gpt_corpus, "--model-type", "gpt", "--data-path", "nowhere/at_all")
    assert done.returncode == 1
    assert "nowhere/at_all" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_split_without_training_data(command: Any, gpt_corpus: list[object]) -> None:
    done = start(command, gpt_corpus, "--model-type", "gpt", "--split", "0,50,50")
    assert "--split '0,50,50' leaves no training data" in done.stderr


def test_data_of_another_tokenizer_is_refused(
    command: Any, gpt_corpus: list[object], bert_corpus: list[object], tmp_path: Path
) -> None:
    """Instead of an index out of range, deep in the model."""
    prefix, others = gpt_corpus[:2], bert_corpus[2:]
    done = start(command, [*prefix, *others], "--model-type", "gpt2")
    assert "but tokenizer and model have 77: it was made with another tokenizer" in done.stderr
    assert done.returncode == 1
    run = tmp_path / "run"
    words = ["--train-iters", 1, "--eval-iters", 0]
    start(command, bert_corpus, "--model-type", "bert", "--vocab-size", 90, "--save", run, *words)
    words += ["--pretrained-model-name-or-path", run / "last"]
    larger = tmp_path / "larger.txt"
    larger.write_text("\n".join([*BERT_SPECIAL, *(f"w{i}" for i in range(200))]) + "\n")
    done = start(command, bert_corpus, *words, "--vocab-file", larger)
    assert (
        "has 90 token embeddings, but the tokenizer BertWordPieceLowerCase has 205" in done.stderr
    )


def test_a_model_that_learns_nothing_from_text(command: Any, gpt_corpus: list[object]) -> None:
    done = start(command, gpt_corpus, "--model-type", "vit")
    assert "does not know what a vit model learns from text" in done.stderr


def test_tasks_list_pretraining(command: Any) -> None:
    assert "pretraining\n    Train a model on raw text" in command("tasks").stdout
