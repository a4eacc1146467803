"""Problems of a command: all of them at once, and before anything heavy is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rapidformer
from rapidformer.checkpoint.finding import ARGUMENTS_FILE
from rapidformer.cli.checks import check_command
from rapidformer.cli.main import main as run_command
from rapidformer.config import parse_arguments
from rapidformer.config.parse import read_flags
from rapidformer.errors import ConfigurationError
from rapidformer.nearest import find_nearest

Find = Callable[..., list[str]]


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Find:
    """The problems of a command beside a model folder ``model`` and a file ``rows.jsonl``."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "label": 0}\n{"text": "b", "label": 1}\n')
    monkeypatch.chdir(tmp_path)

    def run(command: str, text: str) -> list[str]:
        try:
            check_command(command, read_flags(text.split()))
        except ConfigurationError as error:
            return error.problems
        return []

    return run


BASE = "--task sequence_classification --pretrained-model-name-or-path model --data-path rows.jsonl"


def test_a_sound_command_has_no_problems(find: Find) -> None:
    assert find("train", f"{BASE} --save run --metric-for-best-model eval_accuracy") == []


def test_calls_are_checked_like_the_command(find: Find) -> None:
    wrong = "--load model --task ner --device cpu --lr -1 --output ."
    settings = {"load": "model", "task": "ner", "device": "cpu", "lr": -1, "output": "."}
    for name, word, call in (
        ("evaluate", "--data-path", rapidformer.evaluate),
        ("predict", "--input", rapidformer.predict),
    ):
        expected = find(name, f"{wrong} {word} missing.jsonl")
        assert any("missing.jsonl" in problem for problem in expected) and len(expected) > 2
        with pytest.raises(ConfigurationError) as caught:
            call("missing.jsonl", **settings)
        assert caught.value.problems == expected
        expected = find(name, f"{wrong} --data-path rows.jsonl")
        with pytest.raises(ConfigurationError) as caught:
            call([{"text": "a", "label": 0}], **settings)
        assert caught.value.problems == expected, "rows in memory are checked like a file's"
    with pytest.raises(ConfigurationError, match="data= and data_path= exclude each other"):
        rapidformer.evaluate([{"text": "a"}], load="model", data_path="rows.jsonl")
    with pytest.raises(ConfigurationError, match="data= and data_path= exclude each other"):
        rapidformer.evaluate("rows.jsonl", load="model", data_path="rows.jsonl")
    with pytest.raises(ConfigurationError, match="data= and input= exclude each other"):
        rapidformer.predict("a text", load="model", input=["another"])
    with pytest.raises(ConfigurationError, match="--chat is a conversation in a terminal"):
        rapidformer.predict(load="model", task="causal_lm", chat=True)


def test_all_problems_are_reported_at_once(find: Find) -> None:
    problems = find(
        "train",
        "--task sequence_classification --pretrained-model-name-or-path ./nowhere --data-path "
        "rows.jsonl --text-column txet --label-column lable --valid-data missing.csv --lr -1e-4 "
        "--metric-for-best-model acuracy --save rows.jsonl --microbatch-size 4 "
        "--micro-batch-size 4 --global-batch-size 6",
    )
    said = "\n".join(problems)
    assert "unknown flag --microbatch-size: did you mean --micro-batch-size?" in said
    assert "--lr must not be negative, got -0.0001." in said
    assert "--save rows.jsonl is a file: give a folder for the run." in said
    assert "--metric-for-best-model acuracy" in said and "Did you mean accuracy?" in said
    assert "There is no model folder nowhere." in said
    assert "--valid-data missing.csv" in said
    assert "--text-column txet: the data has no such column." in said
    assert "--label-column lable: the data has no such column." in said
    assert "--global-batch-size 6 is not a multiple of --micro-batch-size 4" in said
    assert "Did you mean --label-column label?" in said


@pytest.mark.parametrize(
    "task",
    ["token_classification", "question_answering", "multiple_choice", "seq2seq_lm", "masked_lm",
     "causal_lm", "image_classification", "speech_recognition", "audio_classification"],
)  # fmt: skip
def test_columns_of_every_task_are_looked_for(task: str, find: Find) -> None:
    Path("odd.jsonl").write_text('{"foo": "x", "bar": 1}\n')
    words = BASE.replace("sequence_classification", task).replace("rows.jsonl", "odd.jsonl")
    (problem,) = find("train", words)
    assert "No column with" in problem and "foo, bar" in problem


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", "body,label\nx,1\n"),
        ("rows.tsv", "body\tlabel\nx\t1\n"),
        ("rows.json", '[{"body": "x", "label": 1}]'),
        ("rows.ndjson", '{"body": "x", "label": 1}\n'),
    ],
)
def test_heads_of_files_are_read(name: str, content: str, find: Find) -> None:
    Path(name).write_text(content)
    (problem,) = find("train", BASE.replace("rows.jsonl", name))
    assert "No column with the text was found" in problem and "body, label" in problem


def test_a_missing_deepspeed_file_is_reported_with_the_rest(find: Find) -> None:
    problems = find("train", f"{BASE} --deepspeed missing.json --lr -1")
    assert len(problems) == 2 and "--deepspeed missing.json cannot be read" in problems[0]


def test_batches_of_several_nodes_are_checked_once_their_processes_are_known(find: Find) -> None:
    """A node with two processes and one with one, which sees itself as one of two with one."""
    batches = "--nproc-per-node 1 --device cpu --micro-batch-size 4 --global-batch-size 12"
    nodes = "--nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port 29500"
    assert find("train", f"{BASE} {batches} {nodes}") == []
    assert find("train", f"{BASE} {batches.replace('12', '13')}") != []


def test_a_place_that_cannot_be_written_to_is_refused(find: Find) -> None:
    (problem,) = find("train", f"{BASE} --save /proc/run")
    assert problem == "--save /proc/run: /proc cannot be written to. Choose another folder."


def test_cuda_without_a_gpu(find: Find, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rapidformer.cli.checks.count_gpus", lambda: 0)
    monkeypatch.setattr("rapidformer.tasks.rows.preflight._GPU_DRIVER", tmp_path / "none")
    (problem,) = find("train", f"{BASE} --device cuda")
    assert "this machine has no GPU. Omit --device to run on the CPU." in problem


def test_evaluate_needs_a_model_and_a_task(find: Find) -> None:
    assert find("evaluate", "--task causal_lm --data-path rows.jsonl")[0].startswith(
        "evaluate needs a trained model: give --load RUN"
    )
    (problem,) = find("evaluate", "--load model --data-path rows.jsonl")
    assert "evaluate needs --task, since --load does not name a run with a task" in problem
    (problem,) = find("evaluate", "--load runs_typo --data-path rows.jsonl")
    assert "since runs_typo is not a folder here. Check its name" in problem
    Path("empty").mkdir()
    (problem,) = find("evaluate", "--load empty")
    assert problem.startswith("--load empty has no model")


def test_texts_and_objects_in_the_input_are_not_mixed(find: Find) -> None:
    words = ["--task", "sequence_classification", "--load", "model"]
    with pytest.raises(ConfigurationError, match=r"--input mixes texts .* and JSON objects"):
        check_command("predict", read_flags([*words, "--input", "a movie", '{"text": "x"}']))
    with pytest.raises(ConfigurationError, match="is not valid JSON"):
        check_command("predict", read_flags([*words, "--input", '{"text": x}']))


def test_an_output_that_cannot_be_written_is_refused(find: Find) -> None:
    words = "--task sequence_classification --load model --data-path rows.jsonl --output"
    problem = "--output /proc/x.csv: /proc cannot be written to. Choose another folder."
    assert find("predict", f"{words} /proc/x.csv") == [problem]
    assert find("evaluate", f"{words} model") == [
        "--output model is a folder: give a file in it.",
        *find("evaluate", f"{words} x.json"),
    ]
    (problem,) = find("predict", f"{words} /dev/null")
    assert problem.startswith("--output /dev/null is not a regular file"), "it would be replaced"


def test_a_missing_file_is_not_taken_for_a_text(find: Find) -> None:
    words = "--task sequence_classification --load model --input"
    assert find("predict", f"{words} rosw.jsonl") == ["--input rosw.jsonl: there is no such file."]
    assert find("predict", f"{words} rows.jsonl") == []
    assert find("predict", f"{words} Really?") == []


@pytest.mark.parametrize(
    ("facts", "advice"),
    [("{}", "Use the script that trained it."), ('{"base": 1}', "best or last")],
)
def test_a_checkpoint_without_a_model_is_refused(facts: str, advice: str, find: Find) -> None:
    Path("run/iter_0000002").mkdir(parents=True)
    Path("run/iter_0000002/run.json").write_text(facts)
    problem = find("evaluate", "--load run")[0]
    assert problem.startswith("--load run/iter_0000002 is a checkpoint to resume training from: ")
    assert advice in problem


def test_a_run_knows_its_task_and_columns(find: Find, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "best").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (run / "best" / name).write_text("{}")
    (run / ARGUMENTS_FILE).write_text(
        "task: sequence_classification\ntext_column: body\nlabel_column:\n"
        f"data_path: {tmp_path / 'own.jsonl'}\ndata_name: mrpc\nseq_length: 32\nseed: 7\n"
    )
    (tmp_path / "own.jsonl").write_text(json.dumps({"body": "x", "label": 1}) + "\n")
    for load in ("run", "run/best"):
        args, _ = check_command("evaluate", read_flags(["--load", load]))
        assert (args.task, args.text_column, args.seq_length) == (
            "sequence_classification", "body", 32,
        )  # fmt: skip
        assert args.data_path == str(tmp_path / "own.jsonl") and args.seed == 7
        assert args.load == "run/best"
    (problem,) = find("predict", "--load run --data-path rows.jsonl")
    assert "--text-column body: the data has no such column" in problem
    assert find("predict", "--load run --data-path rows.jsonl --text-column text") == []
    (problem,) = find("predict", "--load run")
    assert problem.startswith("no data: give --input TEXT ... or --data-path")


def test_negative_numbers_reach_their_flag() -> None:
    assert parse_arguments(["--lr", "-1e-4"]).lr == -1e-4
    assert parse_arguments(["--lr", "-.5", "--seed", "3"]).lr == -0.5


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("--epoch", "--epochs"), ("--micro_batchsize", "--micro-batch-size"), ("--stream", None)],
)
def test_only_near_names_are_suggested(typed: str, meant: str | None) -> None:
    assert find_nearest(typed, ["--epochs", "--micro-batch-size", "--hysteresis"]) == meant


def test_bad_values_do_not_hide_unknown_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--lr", "abc", "--epochz", "3"]) == 1
    said = capsys.readouterr().err
    assert "--lr needs a number, got 'abc'." in said
    assert "unknown flag --epochz: did you mean --epochs?" in said


def test_values_that_cannot_be_read_do_not_hide_other_problems(find: Find) -> None:
    """Nor are they reported twice, as if the flag had not been given."""
    words = f"{BASE} --lr-scheduler-type cosin --warmup-ratio 3 --text-column txet"
    style, warmup, column = find("train", words)
    assert style.startswith("--lr-scheduler-type (--lr-decay-style) must be one of constant, ")
    assert warmup.startswith("--lr-warmup-fraction must be at least 0 and below 1")
    assert column.startswith("--text-column txet: the data has no such column.")
    words = "--task pretraining --model-type gpt --data-path nowhere --seq-length big"
    length, *others = find("train", words)
    assert length == "--seq-length needs a whole number, got 'big'."
    assert [text.split(": ")[0] for text in others] == [
        "give the length of training", "--task pretraining needs --lr, the peak learning rate.",
        "nowhere cannot be read",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("task", "name", "content", "message"),
    [
        ("causal_lm", "rows.txt", "", "rows.txt is empty (0 bytes)."),
        ("causal_lm", "rows.xlsx", "PK", "rows.xlsx: this file type is not supported; use .arrow"),
        ("causal_lm", "a.jsonl", '{"text": "a"}\n\n{"text": \n', "a.jsonl, line 3: not valid JSON"),
        ("causal_lm", "a.jsonl", '{"messages": "hello"}\n', "To train on it as plain text, give "
         "--text-column messages."),
        ("causal_lm", "a.jsonl", '{"messages": ["hello"]}\n', "messages holds ['hello'], not "
         "the turns of conversations, such as [{"),
        ("token_classification", "a.jsonl", '{"text": "a b", "label": 0}\n', "row 1: label holds "
         "0, and tagging needs one tag for each word. To learn one label for a whole text"),
        ("token_classification", "a.jsonl", '{"text": "a b", "tags": ["O"]}\n', "row 1: 2 words in "
         "text but 1 tags in tags"),
        ("reranking", "a.jsonl", '{"text": "a"}\n', "The data has only the column text: "),
    ],
)  # fmt: skip
def test_first_rows_show_what_is_wrong_with_the_data(
    task: str, name: str, content: str, message: str, find: Find
) -> None:
    Path(name).write_text(content)
    words = BASE.replace("sequence_classification", task).replace("rows.jsonl", name)
    (problem,) = find("train", words)
    assert message in problem


def test_an_empty_folder_has_no_data(find: Find) -> None:
    Path("empty").mkdir()
    (problem,) = find("train", BASE.replace("rows.jsonl", "empty"))
    assert problem.startswith("empty holds no data files: expected json") and "nothing" in problem


def test_what_else_a_task_needs_is_asked_for_at_once(find: Find) -> None:
    def ask(task: str, more: str = "") -> list[str]:
        return find("train", f"--task {task} --load model --data-path org/rows {more}")

    (problem,) = ask("distillation")
    assert problem.startswith("--task distillation needs --teacher MODEL")
    (problem,) = ask("distillation", "--teacher ./nowhere")
    assert problem == "--teacher ./nowhere: There is no model folder nowhere."
    (problem,) = ask("grpo")
    assert problem.startswith("--task grpo needs --reward-function FILE.py")
    assert any("Did you mean sigmoid?" in text for text in ask("preference", "--loss dpo"))


def test_a_missing_script_is_noticed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--user-script", "missing.py", "--epochz", "3"]) == 1
    assert capsys.readouterr().err == "error: --user-script missing.py is not a file.\n"


def test_nothing_heavy_is_imported_before_problems_are_known(find: Find) -> None:
    code = (
        "import sys; from rapidformer.cli.main import main; status = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'pandas'} & set(sys.modules);"
        "sys.exit(f'{status} {sorted(heavy)}')"
    )
    words = [*BASE.split(), "--text-column", "txet", "--save", "rows.jsonl"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False,
        env=dict(os.environ), timeout=120,
    )  # fmt: skip
    assert "--text-column txet" in done.stderr and "is a file" in done.stderr
    assert done.stderr.splitlines()[-1] == "1 []"


def test_the_first_line_says_what_is_loaded(
    find: Find, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rapidformer.cli import main as command

    monkeypatch.setattr(command, "import_module", lambda name: pytest.fail("too late"))
    monkeypatch.setattr(command, "_start", lambda *given: True)
    assert command.main(BASE.split()) == 0
    assert capsys.readouterr().err == "loading   torch, model, rows.jsonl\n"
