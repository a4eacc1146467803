"""The run's page: its numbers are those of the run, its texts stay texts, bad folders are told."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rapidformer.checkpoint.lock import FolderLock
from rapidformer.report.live import build_server
from rapidformer.report.page import build_content, write_page
from rapidformer.run_events import append_event
from tests.small import make_tokenizer

EVIL = "</script><img src=x onerror=alert(1)> {{content}} \u2028"


def make_run(folder: Path, lines: list[dict[str, Any]], **start: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / ".run.json").write_text('{"wrote": ["metrics.jsonl"]}')
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "arguments.yaml").write_text(
        f"# Training\nlr: {start.pop('lr', 0.1):<55} # command line\nseed: 1234 # default\n"
    )
    if start:
        append_event(folder, "start", step=0, **start)
    return folder


def log(steps: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"step": n, "epoch": 0.1, "loss": 1 / n, "lr": 1e-4 * n, **more} for n in range(1, steps)
    ]


def read_page(page: Path) -> dict[str, Any]:
    """What a browser finds in the page."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r'<script type="application/json" id="content">(.*?)</script>', text, re.S)
    assert len(found) == 1
    content: dict[str, Any] = json.loads(found[0])
    return content


def test_the_page_has_the_numbers_of_the_file(tmp_path: Path) -> None:
    lines = [*log(30), {"step": 20, "eval_loss": 0.5, "eval_accuracy": 0.75}]
    run = make_run(tmp_path / "run", [*lines, {"step": 29, "loss": None}], train_iters=100)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "lo')  # a crash has cut it off
    content = read_page(write_page([run], tmp_path / "page.html"))["runs"][0]
    for name in ("loss", "lr", "eval_loss", "eval_accuracy"):
        wanted = [(line["step"], line[name]) for line in lines if name in line]
        curve = content["curves"][name]
        assert list(zip(curve["x"], curve["y"], strict=True)) == wanted
    assert "epoch" not in content["curves"]
    assert content["evaluations"] == [lines[-1]]
    assert (content["step"], content["total"]) == (29, 100)
    assert content["settings"][0] == ["Training", "lr", "0.1", "command line"]


def test_many_points_are_thinned_and_no_peak_is_lost(tmp_path: Path) -> None:
    lines = log(20_001)
    lines[12_345]["loss"] = 99.0
    run = make_run(tmp_path / "run", lines)
    page = write_page([run], tmp_path / "page.html")
    curve = read_page(page)["runs"][0]["curves"]["loss"]
    assert curve["count"] == 20_000
    assert len(curve["x"]) <= 2000
    known = {(line["step"], line["loss"]) for line in lines}
    assert known.issuperset(zip(curve["x"], curve["y"], strict=True))
    assert max(curve["y"]) == 99.0
    middle, mean = curve["mean"][0][500], curve["mean"][1][500]
    first, last = 10_001, 10_020  # 1000 stretches of 20
    assert first <= middle <= last
    assert mean == pytest.approx(sum(1 / n for n in range(first, last + 1)) / 20)


def test_texts_of_the_user_stay_texts(tmp_path: Path) -> None:
    name = EVIL.replace("/", "") + "\udcff"  # as a byte of a name that is no text
    run = make_run(tmp_path / name, log(3), train_iters=2, command=EVIL, environment={EVIL: EVIL})
    append_event(run, "batch", examples=1, rows=[[{"tokens": [[EVIL, 1, "t"]], "count": 1}]])
    page = write_page([run], tmp_path / "page.html")
    content = read_page(page)["runs"][0]
    assert content["batch"]["rows"][0][0]["tokens"][0][0] == EVIL
    assert content["start"]["command"] == EVIL
    text = page.read_text(encoding="utf-8")
    assert text.count("<img") == 0 and text.count("</script>") == 2
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)


def test_the_prediction_beside_what_came_of_it(tmp_path: Path) -> None:
    plan = {"predicted_memory_gib": 28.0, "predicted_step_time": 0.135}
    old = {"step": 1, **plan, "actual_memory_gib": 9.9}
    lines = [*log(3), old, {"step": 2, **plan, "actual_memory_gib": 27.7}]  # it was resumed
    run = build_content([make_run(tmp_path / "run", lines)])["runs"][0]
    assert run["plan"] == {
        "predicted": {"memory_gib": 28.0, "step_time": 0.135}, "actual": {"memory_gib": 27.7},
    }  # fmt: skip
    assert not any(name.startswith(("predicted_", "actual_")) for name in run["curves"])


def test_several_runs_and_their_settings(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name / "run", log(3), lr=lr) for name, lr in (("a", 1), ("b", 2))]
    content = read_page(write_page(runs, tmp_path / "page.html"))
    assert [run["name"] for run in content["runs"]] == list(map(str, runs))
    assert [run["settings"][0][2] for run in content["runs"]] == ["1", "2"]


def test_states(tmp_path: Path) -> None:
    def judge(folder: Path) -> tuple[str, str]:
        run = build_content([folder])["runs"][0]
        return run["state"], run["reason"]

    run = make_run(tmp_path / "run", log(3, seconds_left=7.0), train_iters=9)
    assert judge(run) == ("killed", "")
    lock = FolderLock(run)
    lock.acquire()
    try:
        assert judge(run) == ("running", "")
        assert build_content([run])["runs"][0]["seconds_left"] == 7.0
        append_event(run, "stall", text="rank 1 is missing")
        assert judge(run) == ("stalled", "rank 1 is missing")
        append_event(run, "moved", text="")
        assert judge(run) == ("running", "")
    finally:
        lock.release()
    append_event(run, "end", step=2, state="failed", reason="DataError: bad row")
    assert judge(run) == ("failed", "DataError: bad row")


def test_a_resumed_run_shows_what_it_repeats_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", log(3), train_iters=9)
    for step in (2, 4):
        append_event(run, "evaluation", step=step, split="validation", samples=[])
    append_event(run, "start", step=2, train_iters=9)
    append_event(run, "evaluation", step=4, split="validation", samples=[])
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    times = [10, 12, 15, 100, 104]  # of the start, two evaluations, the resumed start, the last
    lines = [json.dumps({**event, "time": at}) for event, at in zip(events, times, strict=True)]
    append = {"event": "end", "time": 107, "step": 4, "state": "complete"}
    (run / "events.jsonl").write_text("\n".join([*lines, json.dumps(append)]) + "\n")
    content = build_content([run])["runs"][0]
    assert [event["step"] for event in content["details"]] == [2, 4]
    assert [event["step"] for event in content["events"]] == [0, 2, 4]
    assert content["seconds"] == (15 - 10) + (107 - 100)  # without the pause


def test_bad_folders_are_told_in_one_line(tmp_path: Path, command: Callable[..., Any]) -> None:
    empty = make_run(tmp_path / "empty", [])
    (tmp_path / "nothing").mkdir()
    damaged = make_run(tmp_path / "damaged", log(3))
    (damaged / "metrics.jsonl").write_bytes(b"\xff\x00{{{\n[1]\n")
    for folder, text in (
        (tmp_path / "nothing", "has no metrics.jsonl: give the folder of a run"),
        (tmp_path / "absent", "does not exist"),
        (empty, "has no numbers yet"),
        (damaged, "has no numbers yet"),
    ):
        done = command("report", folder)
        assert done.returncode == 1
        assert text in done.stderr and done.stderr.count("\n") == 1
    own = tmp_path / "own.html"
    own.write_text("mine")
    done = command("report", make_run(tmp_path / "run", log(3)), "--output", own)
    assert "is not a page of ours" in done.stderr and own.read_text() == "mine"


def test_damaged_events_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", log(3), train_iters=2)
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'[1]\n{"event": 3}\n\xff\n{"event": "evalu')
    assert [e["event"] for e in build_content([run])["runs"][0]["events"]] == ["start"]


def test_a_live_page_follows_the_run_and_answers_this_machine_only(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", log(3))
    with build_server([run], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        host, port = server.server_address[:2]
        address = f"http://127.0.0.1:{port}/"
        try:
            assert host == "127.0.0.1"
            with urllib.request.urlopen(address) as answer:
                assert b'data-live="yes"' in answer.read()
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 7, "loss": 0.25}\n')
            with urllib.request.urlopen(address + "content.json") as answer:
                assert json.load(answer)["runs"][0]["curves"]["loss"]["x"] == [1, 2, 7]
            foreign = urllib.request.Request(address, headers={"Host": "example.com"})
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(foreign)
        finally:
            server.shutdown()
            thread.join()


def test_the_page_of_a_sweep(tmp_path: Path) -> None:
    make_run(tmp_path / "sweep" / "trial_0000", log(3))
    trials = [
        {"number": n, "state": state, "value": value, "parameters": {"lr": 0.1}, "error": "",
         "folder": f"trial_{n:04d}"}
        for n, state, value in ((0, "complete", 0.5), (1, "failed", None))
    ]  # fmt: skip
    results = {"metric": "eval_loss", "best": 0, "command": "rapidformer", "trials": trials}
    (tmp_path / "sweep" / "results.json").write_text(json.dumps(results))
    content = build_content([tmp_path / "sweep"])
    assert [run["name"] for run in content["runs"]] == ["trial_0000"]
    assert [trial["has_page"] for trial in content["sweep"]["trials"]] == [False, False]


def test_examples_of_a_batch_are_shown_as_the_model_saw_them() -> None:
    import torch

    from rapidformer.data.label_view import Tokenized, iterate_examples, to_json, view_batch

    tokenizer = make_tokenizer()
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]])
    labels = torch.tensor([[-100, 6, 7, -100], [-100, 9, -100, -100]])
    batch = {"input_ids": ids, "labels": labels, "attention_mask": (ids > 0).long()}
    shown = [
        to_json(view_batch(example, Tokenized(tokenizer)), 2)
        for example in iterate_examples(batch, 2, most=4)
    ]
    assert [row[0]["count"] for row in shown] == [3, 2]
    assert [[t[1:] for t in row[0]["tokens"]] for row in shown] == [
        [[5, ""], [6, "t"]],
        [[8, ""], [9, "t"]],
    ]


def test_a_run_writes_its_record_and_its_page(
    tmp_path: Path, small_model: Path, small_data: Path, command: Callable[..., Any]
) -> None:
    words = [
        "--task", "sequence_classification", "--pretrained-model-name-or-path", small_model,
        "--data-path", small_data, "--micro-batch-size", 4, "--train-iters", 4,
        "--eval-interval", 2, "--log-interval", 1, "--save-strategy", "no",
    ]  # fmt: skip
    done = command(*words, "--save", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    page = tmp_path / "run" / "report.html"
    assert done.stderr.splitlines()[-1].endswith(f"page      {page}")
    content = read_page(page)["runs"][0]
    assert (content["state"], content["step"], content["total"]) == ("complete", 4, 4)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    assert content["curves"]["loss"]["y"] == losses
    assert {"python", "torch", "device"} <= content["start"]["environment"].keys()
    example = content["batch"]["rows"][0][0]
    assert example["tokens"][0][0] == "[CLS]" and example["fact"].startswith("label: ")
    details = [event for event in content["details"] if event["split"] == "validation"]
    assert [event["step"] for event in details] == [2, 4]
    assert details[0]["tables"][0]["title"] == "by class"
    assert sum(map(sum, details[0]["tables"][1]["content"]["counts"])) > 0
    assert {"label", "expected"} <= details[0]["samples"][0].keys()
    assert {"data", "forward", "backward", "update"} <= content["phases"]["seconds"].keys()

    done = command(*words, "--save", tmp_path / "off", "--report", "off")
    assert "page  " not in done.stderr
    assert not (tmp_path / "off" / "report.html").exists()


def test_a_failed_run_tells_why(tmp_path: Path) -> None:
    from rapidformer.config import parse_arguments
    from rapidformer.training.run_record import RunRecord

    run = make_run(tmp_path / "run", log(3), train_iters=9)
    record = RunRecord(
        parse_arguments(["--save", str(run)]), is_main=True, summary=[], prepared=None, details={},
        check_folder=lambda: None,
    )  # fmt: skip
    said: list[str] = []
    loop: Any = type("Loop", (), {"step": 2, "say": staticmethod(said.append)})
    try:
        raise ValueError("of the caller, who tries again")
    except ValueError:
        record.finish(loop, is_done=True)
    assert read_page(run / "report.html")["runs"][0]["state"] == "complete"
    record.see_error(RuntimeError("out of luck"))
    record.finish(loop, is_done=False)
    content = read_page(run / "report.html")["runs"][0]
    assert (content["state"], content["reason"]) == ("failed", "RuntimeError: out of luck")
    assert said == 2 * [f"page      {run / 'report.html'}"]


def test_a_launcher_adds_to_the_record_of_its_own_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rapidformer.dist.heartbeat import announce_record
    from rapidformer.launch.watch import note_in_run

    run = make_run(tmp_path / "run", log(3), train_iters=9)
    monkeypatch.setenv("RAPIDFORMER_HEARTBEATS", str(tmp_path))
    note_in_run(tmp_path, "stall", text="too early")
    announce_record(run / "events.jsonl")
    note_in_run(tmp_path, "stall", text="rank 1 is missing")
    events = build_content([run])["runs"][0]["events"]
    assert [event["event"] for event in events] == ["start", "stall"]
    earlier = run / "earlier"
    earlier.write_text((run / "events.jsonl").read_text())
    earlier.replace(run / "events.jsonl")  # as if the run that was to be replaced had come back
    note_in_run(tmp_path, "end", state="failed")
    assert len(build_content([run])["runs"][0]["events"]) == 2


def test_a_verification_of_a_runs_settings_is_on_its_page(tmp_path: Path) -> None:
    from rapidformer.cli.verify import _Verification
    from rapidformer.config import parse_arguments

    run = make_run(tmp_path / "run", log(3), train_iters=9)
    args = parse_arguments(["--config", str(run / "arguments.yaml")])
    _Verification([], args, None, 1, tmp_path).conclude()
    event = build_content([run])["runs"][0]["events"][-1]
    assert event["verdict"] == "equal: these switches change nothing."


def test_a_language_model_answers_the_first_rows() -> None:
    """The prompt is what comes before the first answer; plain text is continued from its half."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from rapidformer.tasks.base import PreparedData
    from rapidformer.tasks.evaluation.samples import generate_samples

    tokenizer = make_tokenizer()
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1, n_positions=6)
    ).eval()
    rows = [
        {"input_ids": [5, 6, 7, 8, 9, 10], "labels": [-100, -100, 7, 8, -100, 10]},
        {"input_ids": [5, 6, 7, 8]},
        {"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]},
    ]
    prepared = PreparedData(validation=rows, processor=tokenizer, collate=lambda rows: {})
    first, second, third = generate_samples(model, prepared, 4, torch.device("cpu"))
    assert (first["prompt"], first["expected"]) == tuple(map(tokenizer.decode, ([5, 6], [7, 8])))
    assert (second["prompt"], second["expected"]) == tuple(map(tokenizer.decode, ([5, 6], [7, 8])))
    assert third == second
    with torch.no_grad():
        likeliest = int(model(torch.tensor([[5, 6]])).logits[0, -1].argmax())
    assert first["generated"].startswith(tokenizer.decode([likeliest], skip_special_tokens=True))
