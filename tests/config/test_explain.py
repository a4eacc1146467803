"""``rapidformer explain``: every row of a run, and what the engine says after composing."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from rapidformer.accel.unpad.calls import Removal
from rapidformer.cli.main import main
from rapidformer.config import parse_arguments, resolve
from rapidformer.config.explain import Answer, explain
from rapidformer.config.switches import SWITCHES, Situation
from rapidformer.engine import RapidformerEngine
from rapidformer.overlay import get_fact
from tests.parity.models import build_model

GPU = Situation(device="cuda", precision="bf16")


def ask(words: list[str], situation: Situation, ranks: int = 1) -> dict[str, Answer]:
    args = resolve(parse_arguments(words), world_size=ranks)
    return {answer.name: answer for answer in explain(args, situation)}


def test_every_row_has_one_answer() -> None:
    assert sorted(ask([], GPU)) == sorted(switch.name for switch in SWITCHES)


def test_states_reasons_and_how_to_change_them() -> None:
    answers = ask(["--compile", "--mixed-precision", "bf16", "--without", "host-masks"], GPU)
    assert (answers["compilation"].state, answers["compilation"].change) == (
        "on", "leave out --compile",
    )  # fmt: skip
    assert answers["CUDA graph"].state == "on" and "by default" in answers["CUDA graph"].why
    assert answers["CUDA graph"].change == "--cuda-graph off"
    assert answers["hashed dropout"].change == "--without hashed-dropout"
    assert (answers["host masks"].state, answers["host masks"].change) == (
        "off", "leave host-masks out of --without",
    )  # fmt: skip
    assert answers["recompute"].change == "--checkpoint-activations"
    assert answers["tensor parallelism"].change == "--tensor-model-parallel-size N"
    assert answers["data parallelism"].state == "not applicable"
    assert "4.09 instead of 4.80 ms" in answers["merged linear layers"].measured


def test_a_cpu_compiles_only_if_a_backend_is_asked_for() -> None:
    on_cpu = Situation(device="cpu", precision="fp32")
    answer = ask(["--compile"], on_cpu)["compilation"]
    assert answer.state == "not applicable"
    assert "on a CPU, nothing is compiled" in answer.why
    assert "--compile-backend inductor compiles all the same" in answer.why
    assert ask(["--compile", "--compile-backend", "inductor"], on_cpu)["compilation"].state == "on"
    assert ask(["--compile"], GPU)["compilation"].state == "on"


def test_what_a_run_is_told_to_turn_on_has_a_figure() -> None:
    for switch in SWITCHES:
        assert all(times > 1.5 for times in switch.times.values())
        assert switch.gain or not switch.times


def test_what_gives_way_says_to_what() -> None:
    answers = ask(["--activation-offload"], GPU)
    assert answers["CUDA graph"].state == "not applicable"
    assert "--activation-offload" in answers["CUDA graph"].why
    on_cpu = ask([], Situation(device="cpu", precision="fp32"), ranks=2)
    assert "CUDA device, and this run is on CPU" in on_cpu["small tables"].why
    assert on_cpu["data parallelism"].state == "on"


def test_figures_stand_in_the_docs(docs: str) -> None:
    """No figure without a measurement: every number of a gain is on one of these pages."""
    for switch in SWITCHES:
        words = switch.gain.replace(",", " ").replace(";", " ").split()
        for word in words:
            number = word.rstrip("k.")
            if number.replace(".", "").isdigit() and "." in number:
                assert number in docs, (switch.name, number)


@pytest.fixture
def docs(request: pytest.FixtureRequest) -> str:
    names = ("docs/speed.md", "docs/performance.md", "benchmarks/ATTEMPTS.md")
    return "".join((request.config.rootpath / name).read_text("utf-8") for name in names)


def test_the_command_lists_rows_and_ends_with_what_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--device", "cpu", "--cuda-graph", "on", "--checkpoint-activations", "--cpu-offload"]
    assert main(["explain", *flags]) == 1
    output = capsys.readouterr()
    assert "on             recompute: recompute activations in the backward pass" in output.out
    assert "(asked for: --checkpoint-activations)" in output.out
    assert "--cuda-graph on cannot be combined with --cpu-offload" in output.err
    assert main(["explain", "--device", "cpu"]) == 0


# ---- composed ------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """Gives every token something of all others, padding included."""

    def forward(self, hidden: Any) -> Any:
        return hidden + hidden.mean(1, keepdim=True)


def find_line(engine: RapidformerEngine, name: str) -> str:
    return next(line for line in engine.explain().splitlines() if f" {name}: " in line)


def test_what_was_found_out_about_the_model_is_explained() -> None:
    """A row that is on by the settings, and does not suit this model; and one that stops later."""
    mixing, plain = build_model("bert"), build_model("bert")
    mixing.bert.encoder.layer[0].output.LayerNorm = Mixing()
    engine = RapidformerEngine(args={"lr": 0.1, "device": "cpu", "log_level": "error"})
    engine.compose(model=mixing)
    assert "not applicable" in find_line(engine, "dynamic shape")
    assert "gives other results without padding" in find_line(engine, "dynamic shape")
    engine.close()
    engine = RapidformerEngine(args={"lr": 0.1, "device": "cpu", "log_level": "error"})
    engine.compose(model=plain)
    assert find_line(engine, "dynamic shape").startswith("on")
    engine.model.parallelized.applied.add_part("AdamW kernel")
    assert "included: AdamW kernel" in engine.model.parallelized.switches
    get_fact(plain, Removal).turn_off(7, is_late=False)
    expected = "step 7 has read what the model returns for padding"
    assert expected in find_line(engine, "dynamic shape")
    assert f"dynamic shape: off, since {expected}" in engine.model.parallelized.switches
    engine.close()
