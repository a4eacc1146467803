"""Rows, losses by hand, metrics and errors of learning from preferences."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer.config import Settings
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.tasks.preference.examples import Example, find_preference_columns, read_examples
from rapidformer.tasks.preference.losses import (
    LossSettings,
    compute_kto_losses,
    compute_log_odds,
    compute_pair_losses,
    compute_reward_losses,
)
from rapidformer.tasks.registry import get_task
from tests.tasks.preference_rig import make_answers, make_model, make_pairs, run_ours

# ---- values computed by hand -------------------------------------------------------------------
# Policy -10 (4 tokens) and -12 (6 tokens), reference -11 and -11.5.
_CHOSEN, _REJECTED, _LENGTHS = 1.0, -0.5, (4, 6)


def wrap(*values: float) -> list[torch.Tensor]:
    return [torch.tensor([value], dtype=torch.float64) for value in values]


@pytest.mark.parametrize(
    ("name", "expected", "settings"),
    [
        ("sigmoid", 0.6209570478, {}),
        ("sigmoid", 0.6359570478, {"label_smoothing": 0.1}),
        ("robust", 0.6022070478, {"label_smoothing": 0.1}),
        ("hinge", 0.85, {}),
        ("ipo", 12.25, {}),
        ("apo_zero", 0.9625234160, {}),
    ],
)
def test_losses_of_sums(name: str, expected: float, settings: dict[str, float]) -> None:
    loss = compute_pair_losses(*wrap(_CHOSEN, _REJECTED), LossSettings(name=name, **settings))
    assert float(loss) == pytest.approx(expected, abs=1e-9)


def test_losses_of_means() -> None:
    means = wrap(*(v / n for v, n in zip((_CHOSEN, _REJECTED), _LENGTHS, strict=True)))
    ipo = compute_pair_losses(*means, LossSettings(name="ipo"))
    sigmoid = compute_pair_losses(*means, LossSettings())
    assert float(ipo) == pytest.approx(21.7777778, abs=1e-7)
    assert float(sigmoid) == pytest.approx(0.6766193964, abs=1e-9)


def test_simpo_and_orpo_need_no_reference() -> None:
    means = wrap(-2.5, -2.0)
    settings = LossSettings.read(Settings(task="preference", loss="simpo"))
    assert (settings.beta, settings.gamma, settings.sft_weight) == (2.0, 1.0, 0.0)
    simpo = compute_pair_losses(*means, settings)
    assert float(simpo) == pytest.approx(2.1269280110, abs=1e-9)
    assert float(compute_log_odds(*means)) == pytest.approx(-0.5597629741, abs=1e-9)
    orpo = compute_pair_losses(*means, LossSettings(name="orpo"))
    assert float(orpo) == pytest.approx(1.0116945781, abs=1e-9)


def test_odds_of_certain_answers_are_finite() -> None:
    values = torch.tensor([-1e-30, -1e-7, -0.69, -0.7, -200.0], requires_grad=True)
    odds = compute_log_odds(values, torch.full((5,), -1.0))
    odds.sum().backward()
    assert values.grad is not None
    assert torch.isfinite(odds).all() and torch.isfinite(values.grad).all()


def test_kto_and_reward() -> None:
    good, bad = torch.tensor([True]), torch.tensor([False])
    ratios, baseline = wrap(_CHOSEN, 0.3)
    worse, _ = wrap(_REJECTED, 0.3)
    settings = LossSettings(name="kto")
    loss = compute_kto_losses(ratios, good, baseline, settings)
    assert float(loss) == pytest.approx(0.4825071423, abs=1e-9)
    loss = compute_kto_losses(worse, bad, baseline, settings)
    assert float(loss) == pytest.approx(0.4800106598, abs=1e-9)
    scores = wrap(1.2, 0.4)
    assert float(compute_reward_losses(*scores)) == pytest.approx(0.3711006659, abs=1e-9)
    loss = compute_reward_losses(*scores, margin=torch.tensor(0.5))
    assert float(loss) == pytest.approx(0.5543552445, abs=1e-9)
    loss = compute_reward_losses(*scores, centering=0.01)
    assert float(loss) == pytest.approx(0.3967006659, abs=1e-9)


def test_gradient_of_dpo() -> None:
    chosen, rejected = wrap(_CHOSEN, _REJECTED)
    chosen.requires_grad_()
    compute_pair_losses(chosen, rejected, LossSettings()).backward()
    assert chosen.grad is not None
    assert float(chosen.grad) == pytest.approx(-0.0462570155, abs=1e-9)


# ---- rows --------------------------------------------------------------------------------------
_USER = {"role": "user", "content": "why ?"}
_GOOD, _BAD = ({"role": "assistant", "content": text} for text in ("so", "no"))


def read(row: dict[str, Any], *, may_be_single: bool = False) -> Example:
    columns = find_preference_columns(
        [row], Settings(task="preference"), may_be_single=may_be_single
    )
    cells = {name: [value] for name, value in row.items()}
    return next(iter(read_examples(cells, [0], "train", columns)))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [_USER], "chosen": [_GOOD], "rejected": [_BAD]},
        {"prompt": "why ?", "chosen": [_GOOD], "rejected": [_BAD]},
        {"prompt": [_USER], "chosen": "so", "rejected": "no"},
        {"chosen": [_USER, _GOOD], "rejected": [_USER, _BAD]},
        {"prompt": "why ?", "chosen": [_USER, _GOOD], "rejected": [_USER, _BAD], "score_chosen": 9},
        {
            "conversations": [{"from": "human", "value": "why ?"}],
            "chosen": {"from": "gpt", "value": "so"},
            "rejected": {"from": "gpt", "value": "no"},
        },
        {"messages": [_USER, _GOOD], "rejected_response": "no"},
        {"messages": json.dumps([_USER]), "chosen": "so", "rejected": "no"},
    ],
    ids=["TRL", "text prompt", "text answers", "implicit", "both", "ShareGPT", "messages", "JSON"],
)
def test_conversations(row: dict[str, Any]) -> None:
    example = read(row)
    assert example.get_turns(0) == [_USER, _GOOD]
    assert example.get_turns(1) == [_USER, _BAD]
    assert example.count_answers(0) == example.count_answers(1) == 1


@pytest.mark.parametrize(
    ("row", "prompt", "answers"),
    [
        ({"prompt": "p ", "chosen": "a", "rejected": "b"}, "p ", ("a", "b")),
        ({"question": "p", "chosen_response": "a", "rejected_response": "b"}, "p", ("a", "b")),
        ({"chosen": "Q: x A: yes", "rejected": "Q: x A: no"}, "Q: x A:", (" yes", " no")),
        ({"chosen": "A: cat", "rejected": "A: car"}, "A:", (" cat", " car")),
        ({"chosen": "A: yes", "rejected": "A: yes sir"}, "A:", (" yes", " yes sir")),
        ({"chosen": "A:\nyes", "rejected": "A:\nno"}, "A:\n", ("yes", "no")),
        ({"chosen": "A: yes  ", "rejected": "A: yes  sir"}, "A:", (" yes  ", " yes  sir")),
        ({"chosen": "A: yes", "rejected": "A: yes"}, "A:", (" yes", " yes")),
        ({"prompt": "p", "chosen": '{"a": 1}', "rejected": "{}"}, "p", ('{"a": 1}', "{}")),
    ],
    ids=["TRL", "argilla", "implicit", "in a word", "a beginning", "lines", "spaces", "a tie",
         "answers in JSON"],
)  # fmt: skip
def test_texts(row: dict[str, Any], prompt: str, answers: tuple[str, str]) -> None:
    example = read(row)
    assert (example.prompt, example.answers) == (prompt, answers)


def test_other_columns() -> None:
    row = {"instruction": "p", "input": "c", "system": "s", "chosen": "a", "rejected": "b"}
    example = read(row)
    assert (example.prompt, example.context, example.system) == ("p", "c", "s")
    assert read({**row, "margin": 2}).margin == 2.0
    for name, label in (("label", True), ("kto_tag", "false"), ("label", 0.0)):
        single = read({"prompt": "p", "completion": "a", name: label}, may_be_single=True)
        assert single.answers == ("a",)
        assert single.is_good is (label is True)
    single = read({"messages": [_USER, _GOOD], "label": True}, may_be_single=True)
    assert single.get_turns(0) == [_USER, _GOOD]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"rejected": None}, "train, row 1: the column rejected is empty: every row needs one."),
        ({"chosen": "  "}, "train, row 1: the column chosen holds an empty answer."),
        ({"chosen": ["x"]}, "train, row 1: the column chosen must hold text"),
        ({"margin": "much"}, "train, row 1: the column margin must hold a number, not 'much'."),
        ({"margin": math.nan}, "train, row 1: the column margin must hold a number, not nan."),
    ],
)
def test_bad_rows_are_named(row: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        read({"prompt": "p", "chosen": "a", "rejected": "b", **row})


def test_an_empty_text_without_a_prompt_is_named() -> None:
    with pytest.raises(DataError, match=r"row 1: the column chosen holds an empty answer\."):
        read({"chosen": "", "rejected": "A: no"})


def test_bad_labels_and_missing_columns_are_named() -> None:
    single = {"prompt": "p", "completion": "a", "label": "good"}
    with pytest.raises(DataError, match="row 1: the column label must hold true or false, not 'go"):
        read(single, may_be_single=True)
    with pytest.raises(
        DataError, match=r"answers with a label \(label\).*: --loss kto learns from"
    ):
        read(single)
    with pytest.raises(
        DataError, match=r"No column with the better answer.*and no column with the"
    ):
        read({"prompt": "p", "text": "a"})
    with pytest.raises(DataError, match="No column with the better answer"):
        read({"prompt": "p", "rejected": "a"})
    with pytest.raises(DataError, match=r"^No column with the worse answer"):
        read({"prompt": "p", "chosen": "a"})
    with pytest.raises(DataError, match="begin with an answer, and no column has the prompt"):
        read({"chosen": [_GOOD], "rejected": [_BAD]})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"loss": "sigmod"}, "--loss sigmod: use one of sigmoid.*Did you mean sigmoid?"),
        ({"loss": "orpo", "sft_weight": 1.0}, "orpo has a likelihood term of its own"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "--label-smoothing is part of --loss sigmoid"),
        ({"loss": "robust", "label_smoothing": 0.6}, "must be below 0.5"),
        ({"loss": "simpo", "length_normalized": False}, "simpo is one of means over tokens"),
        ({"beta": 0.0}, "--beta must be positive, got 0.0"),
        ({"sft_weight": -1.0}, "--sft-weight must not be negative, got -1.0"),
        ({"loss": "kto", "micro_batch_size": 1}, "--global-batch-size of at least 2"),
        ({"task": "reward", "label_smoothing": 0.1}, "no effect with --task reward"),
        (
            {"loss": "kto", "precompute_reference": True},
            "asks it about prompts with the answers of",
        ),
        ({"loss": "kto", "global_batch_size": 1}, "compares prompts with the answers of others"),
        ({"packing": True}, "keeps the answers of a pair in rows of their own"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], text: str) -> None:
    from rapidformer.config import resolve

    with pytest.raises(ConfigurationError, match=text):
        resolve(Settings(**{"task": "preference", **settings}))


@pytest.mark.parametrize(
    ("words", "task", "loss", "lr"),
    [
        ({"task": "KTO"}, "preference", "kto", 1e-6),
        ({"task": "dpo"}, "preference", None, 1e-6),
        ({"task": "dpo", "loss": "ipo"}, "preference", "ipo", 1e-6),
        ({"task": "kto", "loss": "kto"}, "preference", "kto", 1e-6),
        ({"task": "reward-model"}, "reward", None, 1e-4),
    ],
)
def test_other_names_say_the_loss_and_have_the_same_defaults(
    words: dict[str, Any], task: str, loss: str | None, lr: float
) -> None:
    from rapidformer.config import arguments_from_mapping, resolve

    args = resolve(arguments_from_mapping(words))
    assert (args.task, args.loss, args.lr) == (task, loss, lr)


def test_a_name_that_says_the_loss_takes_no_other_one() -> None:
    from rapidformer.config import parse_arguments

    with pytest.raises(ConfigurationError, match="--task simpo is --task preference --loss simpo"):
        parse_arguments(["--task", "simpo", "--loss", "orpo"])


# ---- runs --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def prepare(folder: Path, rows: list[dict[str, Any]], task: str = "preference", **more: Any) -> Any:
    args = Settings(task=task, pretrained_model_name_or_path=str(folder), seq_length=12, **more)
    return get_task(task).prepare(args, {"train": rows})


def test_ties_and_pairs_that_do_not_fit_are_counted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = " ".join(["w1"] * 20)
    rows = [
        {"prompt": "w1 ", "chosen": "w2", "rejected": "w3"},
        {"prompt": "w1 ", "chosen": "w2", "rejected": "w2"},
        {"prompt": long, "chosen": "w2", "rejected": "w3"},
        {"prompt": "w1 ", "chosen": long, "rejected": "w3"},
    ]
    prepared = prepare(folder, rows)
    assert [sample["input_ids"] for sample in prepared.train[:1]] == [[[3, 4, 0], [3, 5, 0]]]
    assert [sample["labels"] for sample in prepared.train[:1]] == [[[-100, 4, 0], [-100, 5, 0]]]
    assert len(prepared.train) == 2
    assert r"dropped 1 of 4 examples: both answers are the same (a tie) (row 2)" in caplog.text
    assert "no part of the answer fits within --seq-length (row 3)" in caplog.text
    assert "answers of 1 of 2 samples are longer than 12 tokens and were cut" in caplog.text
    batch = prepared.collate(prepared.train)
    assert batch["input_ids"].shape == batch["labels"].shape == (4, 12)
    assert batch["attention_mask"].sum(1).tolist() == [3, 3, 12, 3]
    caplog.clear()
    assert len(prepare(folder, rows, "reward").train) == 1
    assert "dropped 2 of 4 examples: longer than --seq-length (rows 3, 4)" in caplog.text
    caplog.clear()
    # Both answers of a tie are left out: one row cannot say that an answer is good and bad.
    assert len(prepare(folder, rows, loss="kto").train) == 4
    assert "dropped 2 of 8 examples: no part of the answer fits within --seq-length (row 3)" in (
        caplog.text
    )
    assert "dropped 2 of 8 examples: both answers are the same (a tie) (row 2)" in caplog.text


def test_chat_template_and_the_last_answer(tmp_path: Path) -> None:
    """Earlier answers belong to the prompt; a row's own variables go to the template."""
    from tests.tasks.test_chat import CHATML, build_tokenizer

    folder = make_model(tmp_path)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ note }}" + CHATML
    tokenizer.save_pretrained(folder)
    before = [_USER, {"role": "assistant", "content": "blue"}, _USER]
    rows = [
        {"prompt": before, "chosen": [_GOOD], "rejected": [_BAD]},
        {"chosen": [*before, _GOOD], "rejected": [*before, _BAD]},
    ]
    args = Settings(
        task="preference", pretrained_model_name_or_path=str(folder), from_scratch=True,
        seq_length=64,
    )  # fmt: skip
    for row in rows:
        noted = [{**row, "chat_template_kwargs": {"note": "grey"}}]
        prepared = get_task("preference").prepare(args, {"train": noted})
        sample = prepared.train[0]
        for place, answer in enumerate(("so", "no")):
            ids, labels = sample["input_ids"][place], sample["labels"][place]
            trained = [label for label in labels if label != -100]
            assert tokenizer.decode(trained) == f"{answer}<|im_end|>"
            assert tokenizer.decode(ids).count("<|im_start|>") == 4
            assert tokenizer.decode(ids).startswith("grey")


def test_reference_is_where_the_run_starts(folder: Path) -> None:
    """The first loss is ln 2; dropout is off; pairs are unpaired for KTO."""
    run = run_ours("preference", folder, make_pairs(4), micro_batch_size=4, hidden_dropout=None)
    assert run.lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert run.lines[0]["rewards/margins"] == 0
    prepared = prepare(folder, make_pairs(3), loss="kto")
    assert [sample["desirable"] for sample in prepared.train] == [1, 0, 1, 0, 1, 0]


_TIE = {"prompt": "w1 ", "chosen": "w2", "rejected": "w2"}


@pytest.mark.parametrize("loss", ["orpo", "kto"])
def test_evaluation_does_not_depend_on_its_batches(loss: str, folder: Path, tmp_path: Path) -> None:
    """A last, smaller batch; a mean over tokens; a baseline over the whole split."""
    import rapidformer

    start = make_model(tmp_path / "start", "gpt2")
    rows = make_answers(7) if loss == "kto" else [*make_pairs(7), _TIE]
    reports = [
        rapidformer.evaluate(
            {"validation": rows}, task="preference", loss=loss, load=str(folder),
            pretrained_model_name_or_path=str(start), eval_micro_batch_size=size,
            log_level="error", progress=False,
        )
        for size in (7, 2)
    ]  # fmt: skip
    results = [report.metrics for report in reports]
    counts = [(report.examples, report.dropped) for report in reports]
    assert counts == [(7, 0 if loss == "kto" else 1)] * 2
    assert (", 1 dropped" in str(reports[0])) == (loss != "kto")
    names = {"orpo": "nll_loss log_odds_ratio log_odds_chosen rewards/accuracies", "kto": "kl"}
    assert {"loss", "rewards/margins", "logps/chosen", *names[loss].split()} <= results[0].keys()
    assert results[0] == pytest.approx(results[1], rel=2e-6)
    if loss == "orpo":
        whole = results[0]["nll_loss"] - 0.1 * results[0]["log_odds_ratio"]
        assert results[0]["loss"] == pytest.approx(whole, rel=1e-6)


def test_kto_says_how_to_balance_its_weights(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(folder, make_answers(9), loss="kto")
    assert "6 desirable and 3 undesirable answers weigh 2 to 1 in all" in caplog.text
    assert "use a --desirable-weight from 0.5 to 0.667" in caplog.text
    caplog.clear()
    prepare(folder, make_answers(9), loss="kto", desirable_weight=0.5)
    assert "answers weigh" not in caplog.text


def test_showing_both_answers(folder: Path) -> None:
    from rapidformer.data.label_view import view_batch

    rows = [{"prompt": "w1 w2 ", "chosen": "w3", "rejected": "w4 w5"}]
    for task, trained in (
        ("preference", [["w3", "<end>"], ["w4", "w5", "<end>"]]),
        ("reward", [[], []]),
    ):
        prepared = prepare(folder, rows, task)
        shown = view_batch(prepared.collate(prepared.train), prepared)
        assert [row.name for row in shown] == ["chosen", "rejected"]
        marked = [[token.piece for token in row.tokens if token.is_trained] for row in shown]
        assert marked == trained
        assert [len(row.tokens) for row in shown] == [4, 5]
