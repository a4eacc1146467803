"""Other trackers through the callbacks that transformers has for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from rapidformer.training.trackers.tracker import TrackedRun, keep_numbers, name_plainly


class Integration:
    """Calls a callback of transformers as its own training loop would."""

    def __init__(self, name: str) -> None:
        from transformers import TrainerControl, TrainerState
        from transformers.integrations.integration_utils import get_reporting_integration_callbacks

        [build] = get_reporting_integration_callbacks([name])
        self._callback = build()
        self._state = TrainerState(is_local_process_zero=True, is_world_process_zero=True)
        self._control = TrainerControl()
        self._arguments: Any = None

    def start(self, run: TrackedRun) -> None:
        settings = {name: value for name, value in run.settings.items() if value is not None}
        plain = {n: v if isinstance(v, (bool, int, float)) else str(v) for n, v in settings.items()}
        self._arguments = SimpleNamespace(
            output_dir=str(run.folder or "."), run_name=run.asked_name or run.name,
            project=run.asked_project or run.project, resume_from_checkpoint=bool(run.resume_step),
            to_dict=lambda: dict(settings), to_sanitized_dict=lambda: plain,
            load_best_model_at_end=False, metric_for_best_model=None, greater_is_better=None,
            save_total_limit=None,
        )  # fmt: skip
        self._tell("on_train_begin")

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        self._state.global_step = step or 0
        self._state.epoch = values.get("epoch", self._state.epoch)
        logs = {name_plainly(name): value for name, value in keep_numbers(values).items()}
        self._tell("on_log", logs=logs)

    def finish(self) -> None:
        self._tell("on_train_end")

    def _tell(self, event: str, **details: Any) -> None:
        getattr(self._callback, event)(self._arguments, self._state, self._control, **details)
