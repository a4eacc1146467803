"""The reference of preference training is what the run started from, under every layout."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from rapidformer.accel.dropout_seeds import has_dropout
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import CheckpointError, ConfigurationError, DataError
from tests.processes import run_in_kept_processes
from tests.training.preferring import (
    SETTINGS,
    Dpo,
    Preferring,
    Seen,
    answer,
    build_model,
    make_pairs,
    run,
)

ZERO = "zero_{}_memory_optimization"
LORA = {"lora_rank": 2}
SAVED = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that somebody has trained before, with a head of its own."""
    folder = tmp_path_factory.mktemp("adapter")
    model = get_peft_model(build_model(), LoraConfig(**SAVED, modules_to_save=["lm_head"]))
    torch.manual_seed(7)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def check_reference(seen: Seen, expected: dict[tuple[int, ...], tuple[float, float]]) -> None:
    """Every pair has the answers of the same model at each turn, and the first loss is ln 2."""
    assert seen.keys() == expected.keys()
    for pair, turns in seen.items():
        for _, first, second in turns:
            assert (first, second) == pytest.approx(expected[pair], abs=1e-5)


def check_starts_even(seen: Seen) -> None:
    """The first global batch has four pairs; afterwards, the model has moved."""
    first = sorted(seen)[:4]
    for pair in first:
        assert abs(seen[pair][0][0] - math.log(2)) < 1e-7
        assert abs(seen[pair][1][0] - math.log(2)) > 1e-4


@functools.cache
def run_whole() -> Seen:
    """Full tuning in one process."""
    return run({})


@functools.cache
def run_continued(adapter: Path) -> Seen:
    """A trained adapter that learns on, in one process."""
    return run({}, adapter)


def test_reference_of_full_tuning_is_a_copy() -> None:
    seen = run_whole()
    check_reference(seen, answer(build_model()))
    check_starts_even(seen)


def test_reference_in_16_bits(caplog: pytest.LogCaptureFixture) -> None:
    seen = run({"reference_precision": "bf16", "log_level": "info"})
    exact = answer(build_model())
    assert "reference a frozen copy of the model, its weights in bf16" in caplog.text
    for pair, turns in seen.items():
        assert turns[0][1] == turns[1][1] != exact[pair][0]
        assert turns[0][1:] == pytest.approx(exact[pair], abs=0.2)


PEFT = {
    "a head of its own": {"modules_to_save": ["lm_head"]},
    "biases": {"bias": "all"},
    "PiSSA": {"init_lora_weights": "pissa"},
    "DoRA": {"use_dora": True},
}


@pytest.mark.parametrize("kind", ["plain", *PEFT])
def test_reference_of_a_fresh_adapter_is_the_base(kind: str) -> None:
    """Adapters off is not enough where the base's own weights change, or did already."""
    config = json.dumps({"peft_type": "LORA", **SAVED, **PEFT.get(kind, {})})
    seen = run({"peft_config": config})
    check_reference(seen, answer(build_model()))
    check_starts_even(seen)


def test_reference_of_a_continued_adapter_has_it(adapter: Path) -> None:
    """Elsewhere it is the bare base: rewards begin far from 0, and the loss far from ln 2."""
    seen = run_continued(adapter)
    started = PeftModel.from_pretrained(build_model(), adapter)
    check_reference(seen, answer(started))
    check_starts_even(seen)
    base, pair = answer(build_model()), min(seen)
    assert abs(seen[pair][0][1] - base[pair][0]) > 0.1


def test_adapters_of_a_plain_model_have_no_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """compose() adds them to a model that the script did not build with engine.build_model()."""
    provide = "model_optimizer_lr_scheduler_provider"
    monkeypatch.setattr(Preferring, provide, lambda self: (build_model(), None, None))
    engine = RapidformerEngine(args={**SETTINGS, **LORA, "lora_dropout": 0.5})
    assert not has_dropout(Preferring(engine).compose())
    engine.close(gives_back=False)


# ---- layouts -------------------------------------------------------------------------------------


def run_layouts(cases: list[tuple[dict[str, Any], Path | None]]) -> list[Seen]:
    return [run(settings, adapter) for settings, adapter in cases]


@pytest.mark.slow
def test_layouts_have_the_reference_of_one_process(adapter: Path, tmp_path: Path) -> None:
    """Also a run that is resumed under another layout.

    Split sequences are in tests/tasks/test_preference_layouts.py.
    """
    begun = {"epochs": 1, "save": str(tmp_path / "run")}
    whole, continued, fresh = run_whole(), run_continued(adapter), run(LORA)
    run(begun)
    cases: list[tuple[dict[str, Any], Path | None, Seen]] = [
        ({ZERO.format(3): True}, None, whole),
        ({"tensor_model_parallel_size": 2}, None, whole),
        ({"pipeline_model_parallel_size": 2}, None, whole),
        ({ZERO.format(1): True}, adapter, continued),
        ({"tensor_model_parallel_size": 2, **LORA}, None, fresh),
        ({ZERO.format(3): True, "load": begun["save"], "save": str(tmp_path / "on")}, None, whole),
    ]
    pairs = {"micro_batch_size": 2}  # one process has one by one
    layouts = [({**pairs, **settings}, start) for settings, start, _ in cases]
    results = run_in_kept_processes(run_layouts, 2, layouts)
    for number, (settings, _, expected) in enumerate(cases):
        seen: Seen = {}
        for process in results:  # each may have seen some of the pairs, or all of them
            for pair, turns in process[number].items():
                seen.setdefault(pair, turns)
        assert seen.keys() == expected.keys(), settings
        for pair, turns in seen.items():
            wanted = expected[pair][-len(turns) :]
            assert len(turns) == (1 if "load" in settings else 2)
            for now, one in zip(turns, wanted, strict=True):
                assert now == pytest.approx(one, rel=1e-6, abs=4e-6), settings


# ---- computed before training --------------------------------------------------------------------


def test_precomputed_answers_are_those_of_the_reference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    computed = {"precompute_reference": True, "save": str(tmp_path), "log_level": "info"}
    expected = run_whole()
    for pair, turns in run({**computed, "epochs": 1}).items():
        assert turns[0] == pytest.approx(expected[pair][0], rel=2e-6, abs=2e-6)
    assert "reference computed before training for 6 rows" in caplog.text
    caplog.clear()
    again = run({**computed, "load": str(tmp_path)})
    assert "for 6 rows, 6 of them by an earlier part of the run" in caplog.text
    for pair, turns in again.items():
        assert turns[-1] == pytest.approx(expected[pair][1], rel=2e-6, abs=2e-6)


def test_answers_to_other_rows_are_refused(tmp_path: Path) -> None:
    computed = {"precompute_reference": True, "save": str(tmp_path), "epochs": 1}
    run(computed)
    pairs = make_pairs()
    pairs[3]["chosen"][1] += 1
    with pytest.raises(DataError, match=r"train, row 4: it is not the row that .*train.safetens"):
        run({**computed, "load": str(tmp_path), "epochs": 2}, pairs=pairs)
    with pytest.raises(DataError, match=r"has answers for 6 rows, and the data now has 4\."):
        run({**computed, "load": str(tmp_path), "epochs": 2}, pairs=pairs[:4])
    (tmp_path / "reference" / "train.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"train.safetensors is damaged .*Delete it to comp"):
        run({**computed, "load": str(tmp_path), "epochs": 2})


def test_another_reference_is_refused(tmp_path: Path) -> None:
    """The weights that a resumed run starts from are those of its first part, bit for bit."""
    run({"save": str(tmp_path), "epochs": 1})
    file = tmp_path / "reference" / "weights.json"
    weights = json.loads(file.read_text())
    assert set(weights) == set(dict(build_model().named_parameters()))
    weights["model.norm.weight"][1] += 1
    file.write_text(json.dumps(weights))
    message = r"would have another reference: .* model.norm.weight differ. Give the model of the"
    with pytest.raises(CheckpointError, match=message):
        run({"save": str(tmp_path), "load": str(tmp_path)})


def test_weights_of_a_checkpoint_are_the_reference_of_a_new_run(tmp_path: Path) -> None:
    first = run({"save": str(tmp_path / "first"), "epochs": 1})
    second = run({"load": str(tmp_path / "first"), "finetune": True})
    check_starts_even(second)
    pair = min(first)
    assert abs(second[pair][0][1] - first[pair][0][1]) > 1e-3


def test_rows_that_cannot_be_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"--precompute-reference needs rows with number"):
        run({"precompute_reference": True, "train_iters": 1}, pairs=iter(make_pairs()))
    monkeypatch.setattr(Dpo, "asks_known_rows", False)
    with pytest.raises(ConfigurationError, match=r"asks the reference about rows that are known"):
        run({"precompute_reference": True})
