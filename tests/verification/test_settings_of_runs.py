"""What a verification starts and tells, of runs that are not made here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import GraniteMoeHybridConfig, JambaConfig, LlamaConfig

from rapidformer.cli import verify
from rapidformer.cli.verify import DIFFERS, _Verification
from rapidformer.config import parse_arguments
from rapidformer.config.derive import resolve
from rapidformer.models.gpt.configuration import GPTConfig
from rapidformer.verification.causes import find_causes
from rapidformer.verification.compare import find_first_block
from rapidformer.verification.settings import (
    Job,
    can_narrow,
    change_settings,
    count_processes,
    list_switches,
)
from rapidformer.verification.trace import Trace, count_parameters

ZERO = "--zero-1-memory-optimization"


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ("--cpu-offload", 2),
        ("--cpu-offload --hybrid-sharding-size 2", 4),
        (ZERO, 2),
        (f"{ZERO} --context-parallel-size 3", 3),
        (f"{ZERO} --context-parallel-size 2 --hybrid-sharding-size 2", 4),
        (f"{ZERO} --expert-model-parallel-size 4 --hybrid-sharding-size 3", 12),
        ("--context-parallel-size 4 --expert-model-parallel-size 6", 12),
        ("--data-parallel 4", 2),
        ("--data-parallel 4 --tensor-model-parallel-size 2 --nnodes 2 --nproc-per-node 4", 4),
        ("--data-parallel 4 --expert-model-parallel-size 4", 4),
        ("--data-parallel 3 --context-parallel-size 2", 4),
        ("--nproc-per-node 3 --data-parallel 3", 3),
        ("--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", 4),
    ],
)
def test_the_fewest_processes_under_which_every_switch_has_something_to_do(
    flags: str, processes: int
) -> None:
    args = parse_arguments(["--task", "causal_lm", *flags.split()])
    assert count_processes(args) == processes
    for kind, world_size in (("switched", processes), ("whole", 1)):
        job = Job(
            folder="/nowhere", kind=kind, updates=1, processes=processes, is_full_size=True,
            global_batch_size=4, micro_batch_size=4,
        )  # fmt: skip
        assert resolve(change_settings(args, job), world_size=world_size).train_iters == 1


@pytest.mark.parametrize("flag", ["--compile", "--onnx-runtime-training"])
def test_compilation_is_verified_on_a_cpu_too(flag: str) -> None:
    args = parse_arguments(["--task", "causal_lm", flag])
    changed = {
        kind: change_settings(args, Job(
            folder="/nowhere", kind=kind, updates=1, processes=1, is_full_size=True,
            global_batch_size=4, micro_batch_size=4,
        ))
        for kind in ("switched", "whole")
    }  # fmt: skip
    assert changed["switched"].compile_backend == "inductor"
    assert not changed["whole"].compile and not changed["whole"].onnx_runtime_training


def test_what_is_verified_of_a_pipeline_is_reported() -> None:
    flags = "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"
    args = parse_arguments(["--task", "causal_lm", *flags.split()])
    assert list_switches(args, 2) == flags.replace(" --", "\n--").split("\n")


def test_parameters_of_all_stages_are_counted_and_tied_ones_once() -> None:
    matrix, bias = np.zeros((2, 3)), np.zeros(3)
    facts = {"tied": [["a", "b"]]}
    stages = [Trace(start={"a": matrix}, facts=facts), Trace(start={"b": matrix, "c": bias})]
    assert count_parameters(stages) == 9


def test_a_block_that_every_process_computes_whole_is_not_blamed() -> None:
    """Rows too short to share: both context-parallel processes have all tokens."""
    alike = Trace(blocks={"layers.0": 4.0, "layers.1": 6.0})
    whole, shares = [
        [
            Trace(place={"data": 0, "pipeline": 0, "tensor": 0, "context": rank}, blocks=blocks)
            for rank in range(2)
        ]
        for blocks in ({"layers.0": 4.0, "layers.1": 6.0}, {"layers.0": 2.0, "layers.1": 2.0})
    ]
    assert find_first_block(alike, whole) == ""
    assert find_first_block(alike, shares) == "layers.1"


def test_ranks_that_share_layers_must_draw_the_same_dropout_masks() -> None:
    def build(tensor: int, draws: list[list[float]]) -> Trace:
        place = {"data": 0, "pipeline": 0, "tensor": tensor, "context": 0}
        return Trace(place=place, draws=draws)

    alike = find_causes(Trace(), [build(0, [[0.1, 0.2]]), build(1, [[0.1, 0.2]])])
    assert [d.value for d in alike["dropout masks"]] == [0.0]
    (wrong,) = find_causes(Trace(), [build(0, [[0.1]]), build(1, [[0.3]])])["dropout masks"]
    assert not wrong.is_equal
    assert "share layers by tensor parallelism, but draw different dropout masks" in wrong.cause


def test_round_off_of_other_micro_batches_is_not_blamed_on_the_loss() -> None:
    """Adam turns the round-off in a gradient that is zero in theory into steps."""

    def make_trace(change: float) -> Trace:
        ones = np.ones(4)
        return Trace(
            losses=[(4.0, 4.0)], samples=[(4, 4)], norms=[2.0], start={"bias": ones},
            gradients=[{"bias": ones}], weights={"bias": ones * (1 + change)},
        )  # fmt: skip

    for shaken, status in ((1e-6, 0), (1e-9, DIFFERS)):
        verification = _Verification([], parse_arguments([]), None, 1, Path())
        runs = {"disturbed": make_trace(2e-5), "shaken": make_trace(shaken)}
        verification._start = lambda kind, *_: [runs[kind]]  # noqa: B023
        verification._is_deterministic = lambda _: True
        verification._explain(make_trace(0.0), [make_trace(2e-5)], is_cut=False)
        assert verification._status == status


JOB = Job(
    folder="/nowhere", kind="switched", updates=1, processes=1, global_batch_size=4,
    micro_batch_size=4,
)  # fmt: skip
SIZES = {"vocab_size": 50, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize("kind", ["llama", "gpt", "granite"])
def test_models_are_narrowed_if_that_leaves_one_that_runs(kind: str, tmp_path: Path) -> None:
    """The states of a Mamba layer have a width of their own, which must fit the model's."""
    sizes = {**SIZES, "num_hidden_layers": 6}
    if kind == "llama":
        LlamaConfig(**sizes, intermediate_size=48).save_pretrained(tmp_path)
    elif kind == "gpt":  # AutoModel has no class for it
        GPTConfig(**sizes).save_pretrained(tmp_path)
    else:
        GraniteMoeHybridConfig(
            **sizes, shared_intermediate_size=48, num_local_experts=0, mamba_n_heads=4,
            mamba_d_state=8, layer_types=["mamba", "attention"] * 3,
        ).save_pretrained(tmp_path)  # fmt: skip
    flags = f"--task causal_lm --pretrained-model-name-or-path {tmp_path} --checkpoint-activations"
    args = parse_arguments(flags.split())
    job = replace(JOB, is_narrow=can_narrow(args, JOB))
    changed = change_settings(args, job)
    assert (changed.from_scratch, changed.num_layers) == (True, 2)
    assert changed.hidden_size == (None if kind == "granite" else 32)


def test_a_job_tells_its_processes_whether_to_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not try it again: that takes seconds with a large vocabulary."""
    verification = _Verification([], parse_arguments([]), SimpleNamespace(
        full_size=False, verify_steps=1
    ), 1, Path())  # fmt: skip
    tried, jobs = [], []
    monkeypatch.setattr(verify, "can_narrow", lambda args, job: bool(tried.append(job)))
    monkeypatch.setattr(verify, "start_run", lambda *_, job, **__: jobs.append(job))
    monkeypatch.setattr(Trace, "load", lambda path: Trace())
    for kind in ("switched", "whole"):
        verification._start(kind, "")
    assert len(tried) == 1 and [job.is_narrow for job in jobs] == [False, False]


@pytest.mark.parametrize(
    ("kind", "stages", "layers"), [("granite", 1, 6), ("granite", 2, 8), ("jamba", 1, 6)]
)
def test_a_hybrid_keeps_a_layer_of_each_kind(
    kind: str, stages: int, layers: int, tmp_path: Path
) -> None:
    """As many as reach the first attention layer, in each part of a pipeline as many."""
    sizes = {**SIZES, "num_hidden_layers": 12}
    if kind == "granite":
        types = [*["mamba"] * 5, "attention"] * 2
        GraniteMoeHybridConfig(**sizes, layer_types=types).save_pretrained(tmp_path)
    else:
        JambaConfig(**sizes, attn_layer_period=8, attn_layer_offset=4).save_pretrained(tmp_path)
    flags = (
        f"--task causal_lm --pretrained-model-name-or-path {tmp_path} "
        f"--pipeline-model-parallel-size {stages}"
    )
    assert change_settings(parse_arguments(flags.split()), JOB).num_layers == layers
