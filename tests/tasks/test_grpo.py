"""GRPO: advantages, losses and reward functions by hand and against TRL; answers that do not depend
on how they are drawn."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rapidformer.errors import ConfigurationError, DataError
from rapidformer.tasks.grpo.objective import GrpoLoss
from rapidformer.tasks.grpo.rewards import Answer, RewardFunction, load_reward_functions, score
from rapidformer.tasks.grpo.rollouts import Scored, compute_advantages, summarize
from tests.tasks.conftest import make_args

KINDS = ("grpo", "bnpo", "dr_grpo", "dapo")


# ---- advantages ----------------------------------------------------------------------------------


def test_advantages_by_hand() -> None:
    (found,) = compute_advantages([[1, 0, 0, 1]], "group", [])
    assert found == pytest.approx([0.8658754, -0.8658754, -0.8658754, 0.8658754], abs=1e-7)


def test_advantages_may_be_scaled_by_the_update_or_not_at_all() -> None:
    groups, everyone = [[1, 0], [3, 3]], [1, 0, 3, 3, 5]
    assert compute_advantages(groups, "none", everyone) == [[0.5, -0.5], [0, 0]]
    deviation = torch.tensor(everyone).double().std().item()
    found = compute_advantages(groups, "batch", everyone)
    assert found[0] == pytest.approx([0.5 / (deviation + 1e-4), -0.5 / (deviation + 1e-4)])


def test_equal_rewards_are_worth_nothing() -> None:
    assert compute_advantages([[2, 2, 2]], "group", []) == [[0, 0, 0]]


def test_statistics_of_an_update() -> None:
    answers = [
        Scored(1.0, [1.0, math.nan], 2, False), Scored(0.0, [0.0, 4.0], 4, True),
        Scored(1.0, [1.0, 2.0], 1, False), Scored(1.0, [1.0, math.nan], 1, False),
    ]  # fmt: skip
    shown = summarize(answers, ["right", "short"], 2)
    assert shown["reward"] == 0.75 and shown["reward_std"] == 0.5
    assert shown["rewards/short/mean"] == 3.0 and shown["frac_reward_zero_std"] == 0.5
    assert shown["completions/mean_length"] == 2.0 and shown["completions/clipped_ratio"] == 0.25


# ---- losses --------------------------------------------------------------------------------------


def test_normalisations_by_hand() -> None:
    """An answer of 1 token that is worth 1, and one of 3 tokens that is worth -1."""
    logps, counted = torch.zeros(2, 3), torch.tensor([[True, False, False], [True, True, True]])
    worth, found = torch.tensor([1.0, -1.0]), {}
    for kind in KINDS:
        terms = GrpoLoss(kind=kind, max_tokens=4).compute(logps, logps, None, worth, counted)
        found[kind] = (float(terms["loss"].mean), float(terms["loss"].count or 0))
    assert found == {"grpo": (0.0, 2), "bnpo": (0.5, 4), "dr_grpo": (0.25, 2), "dapo": (0.5, 4)}


def test_clipping_and_divergence_by_hand() -> None:
    """A ratio of e^0.5 is cut to 1.2 if its answer is good, and counts in full if it is not."""
    logps, old, counted = torch.full((2, 1), 0.5), torch.zeros(2, 1), torch.ones(2, 1).bool()
    worth, reference = torch.tensor([1.0, -1.0]), torch.ones(2, 1)
    plain = GrpoLoss(beta=0.1, corrects_kl=False)
    terms = plain.compute(logps, old, reference, worth, counted)
    divergence = math.exp(0.5) - 0.5 - 1
    assert float(terms["kl"].mean) == pytest.approx(divergence)
    expected = (-1.2 + math.exp(0.5)) / 2 + 0.1 * divergence
    assert float(terms["loss"].mean) == pytest.approx(expected)
    plain = GrpoLoss(beta=0.1)
    terms = plain.compute(logps, old, reference, worth, counted)
    divergence *= math.exp(0.5)  # by the ratio
    assert float(terms["kl"].mean) == pytest.approx(divergence)
    expected = (-1.2 + math.exp(0.5)) / 2 + 0.1 * divergence
    assert float(terms["loss"].mean) == pytest.approx(expected)
    assert float(terms["clip_ratio/high_mean"].mean) == 0.5
    for above in (0.3, 0.0):
        terms = GrpoLoss(epsilon_high=above).compute(logps, old, None, worth, counted)
        assert float(terms["loss"].mean) == pytest.approx((-1 - above + math.exp(0.5)) / 2)


def make_rollouts() -> dict[str, Tensor]:
    """Stored answers of 1 to 5 tokens, some of whose ratios are clipped."""
    dice = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice, dtype=torch.float64)

    counted = torch.arange(5) < torch.tensor([1, 5, 3, 2, 4, 5])[:, None]
    logps = -draw(6, 5).abs() * counted
    return {
        "logps": logps, "old": logps + 0.3 * draw(6, 5) * counted,
        "reference": logps + 0.5 * draw(6, 5) * counted, "worth": draw(6), "counted": counted,
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("beta", "corrects"), [(0.0, False), (0.04, False), (0.04, True)])
def test_loss_gradient_and_metrics_are_those_of_trl(kind: str, beta: float, corrects: bool) -> None:
    """TRL's ``_compute_loss`` in one process with one batch, which is then bnpo's local one."""
    GRPOTrainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer

    stored = make_rollouts()
    theirs = stored["logps"].clone().requires_grad_()
    trainer: Any = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (theirs, torch.zeros_like(theirs), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level="token", beta=beta, loss_type=kind, epsilon_low=0.2,
        epsilon_high=0.28, use_vllm=False, current_gradient_accumulation_steps=1,
        max_completion_length=7, model=SimpleNamespace(training=True),
        args=SimpleNamespace(use_bias_correction_kl=corrects, delta=None, steps_per_generation=1),
        accelerator=SimpleNamespace(
            num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x
        ),
        _entropy_bonus_enabled=False, _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    ids, mask = torch.zeros(6, 2).long(), stored["counted"].long()
    loss = GRPOTrainer._compute_loss(trainer, None, {
        "prompt_ids": ids, "prompt_mask": torch.ones_like(ids),
        "completion_ids": torch.zeros(6, 5).long(), "completion_mask": mask,
        "advantages": stored["worth"], "old_per_token_logps": stored["old"],
        "ref_per_token_logps": stored["reference"], "num_items_in_batch": mask.sum(),
    })  # fmt: skip
    loss.backward()

    ours = stored["logps"].clone().requires_grad_()
    wanted = GrpoLoss(
        kind=kind, epsilon=0.2, epsilon_high=0.28, beta=beta, corrects_kl=corrects, max_tokens=7
    )
    reference = stored["reference"] if beta else None
    terms = wanted.compute(ours, stored["old"], reference, stored["worth"], stored["counted"])
    terms["loss"].mean.backward()
    assert terms["loss"].mean.item() == pytest.approx(loss.item(), abs=1e-9)
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-9, rtol=0)
    shown = trainer._metrics["train"]
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
        assert float(terms[name].mean) == pytest.approx(shown[name][0], abs=1e-6)
    assert shown["clip_ratio/region_mean"][0] > 0
    if beta:
        assert terms["kl"].mean.item() == pytest.approx(shown["kl"][0], abs=1e-6)


# ---- reward functions ----------------------------------------------------------------------------


def make_answers(count: int = 3) -> list[Answer]:
    return [Answer("p", str(n), [n], {"right": n}, f"train, row {n + 4}") for n in range(count)]


def test_functions_get_the_columns_that_they_ask_for() -> None:
    def named(prompts: Any, answers: Any, right: Any) -> Any:
        return [float(int(a) == r) for a, r in zip(answers, right, strict=True)]

    def anything(prompts: Any, answers: Any, **columns: Any) -> Any:
        assert list(columns) == ["right", "answer_ids"]
        return [None, 2, torch.tensor(3.0)]

    functions = [RewardFunction("named", named), RewardFunction("anything", anything, 0.5)]
    found = score(functions, make_answers())
    assert found[0][0] == 1.0 and math.isnan(found[0][1])
    assert found[1:] == [[1.0, 2.0], [1.0, 3.0]]


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ([1.0, 2.0], r"function f returned 2 rewards for 3 answers \(train, row 4, train, row 5, "),
        (1.0, "function f returned a float for 3 answers"),
        (torch.tensor(1.0), "function f returned a Tensor for 3 answers"),
        (torch.ones(3, 2), r"function f returned tensor\(\[1., 1.\]\) for train, row 4"),
        ([1.0, "good", 1.0], r"function f returned 'good' for train, row 5 \(answer '1'\)"),
        ([1.0, 1.0, math.nan], "function f returned nan for train, row 6"),
        ([1.0, [2], 1.0], r"function f returned \[2\] for train, row 5"),
        ([1.0, None, 1.0], "no reward function applies to train, row 5"),
    ],
)
def test_what_a_function_must_not_return(returned: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        score([RewardFunction("f", lambda prompts, answers: returned)], make_answers())


def test_a_function_that_fails_is_told_by_its_row_and_line() -> None:
    def fail(prompts: list[str], answers: list[str]) -> list[float]:
        return [1 / (int(answer) - 1) for answer in answers]

    text = (
        r"function f failed on train, row 5 \(answer '1'\): ZeroDivisionError: .*\(line \d+ of .*"
        r"test_grpo.py\)\.$"
    )
    with pytest.raises(DataError, match=text):
        score([RewardFunction("f", fail)], make_answers())


def test_reward_files(tmp_path: Path) -> None:
    file = tmp_path / "score.py"
    (tmp_path / "neighbour_of_score.py").write_text("VALUE = 1.0\n")
    file.write_text(
        "from __future__ import annotations\n"
        "import dataclasses, neighbour_of_score\n"
        "@dataclasses.dataclass\n"
        "class Rule:\n    weight: float = neighbour_of_score.VALUE\n"
        "def reward(prompts, answers, **columns): return [0.0] * len(answers)\n"
        "def other(prompts, answers, solution): return [1.0] * len(answers)\n"
        "def bare(answers): return answers\n"
    )
    args: Any = make_args(reward_function=[str(file), f"{file}:other"], reward_weights=[1.0, 0.5])
    first, second = load_reward_functions(args)
    assert (first.name, second.name, second.weight) == ("score", "other", 0.5)
    with pytest.raises(DataError, match="other asks for solution, but the data has the columns a"):
        second.check(["a"])
    broken, wrong = tmp_path / "broken.py", tmp_path / "wrong.py"
    broken.write_text("import nothing_like_that\n")
    wrong.write_text("def reward(:\n")
    for source, text in (
        (str(tmp_path / "none.py"), "there is no file"),
        (f"{file}:missing", "has no function missing"),
        (f"{file}:bare", "must take"),
        (str(broken), r"cannot be imported: ModuleNotFoundError: .* \(line 1 of .*broken.py\)"),
        (str(wrong), r"cannot be imported: SyntaxError: invalid syntax \(wrong.py, line 1\)\.$"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            load_reward_functions(make_args(reward_function=[source]))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="needs --reward-function FILE"):
        load_reward_functions(make_args())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="2 numbers for 1 reward"):
        load_reward_functions(make_args(reward_function=[str(file)], reward_weights=[1.0, 2.0]))  # type: ignore[arg-type]
