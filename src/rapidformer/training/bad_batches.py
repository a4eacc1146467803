"""What the loop does about a batch whose loss is NaN, infinite or a spike (``--on-bad-loss``).

``stop`` looks at the numbers of a log interval when they are read anyway. ``skip`` and ``rollback``
hear of each bad update from the engine's guard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rapidformer.data.loader import DistributedLoader
from rapidformer.data.update import MicroBatchResult, Update
from rapidformer.dist.collectives import gather_from_all
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import DataError, TrainingError
from rapidformer.log import get_logger
from rapidformer.optim.guard import BadUpdate, RecentValues, describe_bad_batch
from rapidformer.training.meter import Measurement
from rapidformer.training.report import Reporter

_ADVICE = (
    "Check the data of that step (empty or broken rows), lower --lr, lengthen the warm-up, or set "
    "--clip-grad; --mixed-precision fp16 is less robust than bf16."
)


class BadBatches:
    """Names bad batches, and counts how often the run was rolled back for one."""

    def __init__(
        self, engine: RapidformerEngine, loader: DistributedLoader, reporter: Reporter
    ) -> None:
        self.rollbacks = 0
        self._engine, self._loader, self._reporter = engine, loader, reporter
        self._recent = engine.updates.recent_values
        self._seen: list[tuple[int, range]] = []
        """Epoch and positions of each batch since the numbers were read last."""
        updates, guard = engine.updates, engine.updates.clock.guard
        if guard is not None:
            is_plain = updates.scaler is None and updates.clock.keeper is None
            guard.is_late = is_plain and guard.can_be_late

    @property
    def is_late(self) -> bool:
        """Whether the verdict on an update is still unknown after it."""
        guard = self._engine.updates.clock.guard
        return guard is not None and guard.is_late

    def see(self, update: Update) -> None:
        """Remember which samples an update was made of."""
        self._seen.append((update.epoch, update.positions))

    def check(self, measured: Measurement, step: int, *, tolerates_infinity: bool) -> None:
        """Stop at the first bad update of a log interval, which ends with this step."""
        seen, self._seen = self._seen, []
        if self._engine.updates.clock.guard is not None:
            return  # it has judged them
        bad = find_first_bad(measured, self._recent, tolerates_infinity=tolerates_infinity)
        if bad is None:
            return
        offset, reason = bad
        samples = self._loader.list_samples(*seen[offset])
        what = describe_bad_batch(reason, step - len(measured.losses) + 1 + offset, samples)
        raise TrainingError(
            f"{what}: training has stopped, and nothing was saved after that step. {_ADVICE} With "
            "--on-bad-loss skip or rollback, a run continues without such a batch."
        )

    def report(self, bad: BadUpdate, step: int) -> dict[str, Any]:
        """Log the batch that was just found bad, or stop; returns its numbers."""
        samples = self._loader.list_samples(*self._seen.pop()) if self._seen else []
        args = self._engine.args
        what = describe_bad_batch(bad.reason, step, samples)
        line: dict[str, Any] = {"bad_step": step, "bad_loss": bad.loss, "bad_grad_norm": bad.norm}
        line["samples"] = samples
        sets = self._loader.list_sets(samples)
        if len(sets) > 1:
            line["sets"] = sets
        if args.on_bad_loss == "skip":
            self._warn(f"{what}: the batch was skipped.")
            return line
        if self.rollbacks >= args.max_rollbacks:
            self._reporter.record({"step": step - 1, **line})
            raise TrainingError(
                f"{what}: training has stopped, because it has been rolled back {self.rollbacks} "
                f"times already (--max-rollbacks). {_ADVICE}"
            )
        self.rollbacks += 1
        self._warn(
            f"{what}: going back to the newest checkpoint, to continue with the samples after this "
            f"batch (rollback {self.rollbacks} of at most {args.max_rollbacks})."
        )
        return line

    def forget(self) -> None:
        """The steps since the numbers were read were taken back."""
        self._seen = []

    def state_dict(self) -> dict[str, Any]:
        return {"rollbacks": self.rollbacks, "recent": self._recent.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rollbacks = max(self.rollbacks, int(state.get("rollbacks", 0)))
        self._recent.load_state_dict(state.get("recent", []))

    def _warn(self, sentence: str) -> None:
        if self._engine.is_main:
            get_logger().warning(sentence)


def find_first_bad(
    measured: Measurement, recent: RecentValues, *, tolerates_infinity: bool
) -> tuple[int, str] | None:
    """The first bad update of an interval and what is wrong with it; the others become recent."""
    for offset, (loss, norm) in enumerate(zip(measured.losses, measured.norms, strict=True)):
        reason = recent.find_problem(loss, norm, tolerates_infinity=tolerates_infinity)
        if reason is not None:
            return offset, reason
        if math.isfinite(norm):
            recent.add(loss, norm)
    return None


def check_first_labels(update: Update, results: Sequence[MicroBatchResult]) -> None:
    """Refuse a first update without a single label on any rank. Every rank must call this."""
    rows = sum(micro_batch.info.rows for micro_batch in update)
    # What a loss is a mean over: the labels that count.
    labels = sum(float(result.weight) for result in results)
    counts = gather_from_all((rows, labels))
    if any(rows for rows, _ in counts) and not any(labels for _, labels in counts):
        raise DataError(
            "all labels of the first batch are ignored (-100), so there is nothing to train on: "
            "check how the data set makes its labels, such as the mask of the assistant's answers. "
            "`rapidformer data show` shows the labels of a task's data."
        )
