"""``TrainingArguments``: the public class, with the names and defaults of ``transformers`` 5.17.

It is a plain, mutable dataclass that knows no rules: its fields and what each does here are in
``names.py``, and ``settings.py`` turns an instance into the ``Settings`` of a run, and checks a new
one. No torch at the top, so that ``rapidformer --help`` and the docs can read it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from rapidformer.dialects.calls import check_arguments_call
from rapidformer.dialects.huggingface.names import (
    NEEDS_METRICS,
    AcceleratorOptions,
    NamedFields,
    list_changed,
)
from rapidformer.errors import ConfigurationError, raise_problems
from rapidformer.log import warn_once

if TYPE_CHECKING:
    import torch

_DICTIONARIES = (
    "accelerator_config", "fsdp_config", "deepspeed", "gradient_checkpointing_kwargs",
    "lr_scheduler_kwargs", "parallelism_config",
)  # fmt: skip
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50, "passive": 20}
_FORMER_NAMES = {"warmup_ratio": "warmup_steps", "evaluation_strategy": "eval_strategy"}
"""Names of transformers 4 that transformers 5 removed, and that many scripts still use."""
_FORMER_SWITCHES: dict[str, tuple[str, Any]] = {
    "no_cuda": ("use_cpu", True),
    "group_by_length": ("train_sampling_strategy", "group_by_length"),
    "include_inputs_for_metrics": ("include_for_metrics", ["inputs"]),
}
"""In calls alone, where they are true: the present name and its value."""
_FORMER_WITHOUT_EFFECT = {
    "overwrite_output_dir": "an earlier run in the folder moves to its previous/",
    "logging_dir": "TensorBoard's files are in output_dir",
    "save_safetensors": "weights are always saved as safetensors",
}
C = TypeVar("C")


class _FormerFlag(argparse.Action):
    """On a command line of ``HfArgumentParser``, a former name sets the present one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name = (option_string or "").lstrip("-").replace("-", "_")
        if name == "warmup_ratio" and not 0 <= values < 1:
            parser.error(f"--warmup_ratio must be at least 0 and below 1, got {values}.")
        is_idle = name in _FORMER_NAMES and not values  # `--warmup_ratio 0.0` next to steps
        if not is_idle:
            setattr(namespace, self.dest, values)


def takes_former_names(cls: type[C]) -> type[C]:
    """Let a class of arguments take the former names too; its signature stays as it is."""
    build: Callable[..., None] = cls.__init__
    fields = inspect.signature(build).parameters.keys()

    @functools.wraps(build)
    def take(self: C, *positional: Any, **named: Any) -> None:
        named = _rename(named)
        unknown = named.keys() - fields
        check_arguments_call(unknown)
        problems = [
            f"{cls.__name__}({name}=...) is not supported: {reason}."
            for name in sorted(unknown)
            for start, reason in getattr(cls, "others", {}).items()
            if name.startswith(start)
        ]
        raise_problems(problems)
        build(self, *positional, **named)

    cls.__init__ = take  # type: ignore[assignment]
    return cls


def _rename(named: dict[str, Any]) -> dict[str, Any]:
    named = dict(named)
    for former, reason in _FORMER_WITHOUT_EFFECT.items():
        if named.pop(former, None) is not None:
            warn_once(f"TrainingArguments({former}=...) has no effect: {reason}.")
    for former, (name, meant) in _FORMER_SWITCHES.items():
        if named.pop(former, None) and name not in named:
            warn_once(f"TrainingArguments({former}=True) is now {name}={meant!r}.")
            named[name] = meant
    renamed = {name: value for name, value in named.items() if name not in _FORMER_NAMES}
    for former, name in _FORMER_NAMES.items():
        value = named.get(former)
        if former == "warmup_ratio" and value is not None and not 0 <= value < 1:
            raise ConfigurationError(f"warmup_ratio must be at least 0 and below 1, got {value}.")
        if value and not renamed.get(name):  # where both are given, the present name wins
            warn_once(f"TrainingArguments({former}={value!r}) is now {name}={value!r}.")
            renamed[name] = value
    return renamed


def _to_plain(value: Any) -> Any:
    """A value as transformers writes it: JSON has neither enums nor dtypes."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _to_plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_to_plain(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [field.name for field in dataclasses.fields(value) if field.name[0] != "_"]
        return {name: _to_plain(getattr(value, name)) for name in shown}
    is_dtype = "torch" in sys.modules and isinstance(value, sys.modules["torch"].dtype)
    return str(value).removeprefix("torch.") if is_dtype else value


@takes_former_names
@dataclass(repr=False)
class TrainingArguments(NamedFields):
    """Settings of a run in Hugging Face's words."""

    def __post_init__(self) -> None:
        if "torch" in sys.modules:
            from rapidformer.dist.processes import follow_own_group

            follow_own_group()
        self.output_dir = str(Path(self.output_dir or "trainer_output").expanduser())
        for name in _DICTIONARIES:
            value = getattr(self, name)
            if isinstance(value, str) and value.lstrip().startswith("{"):
                setattr(self, name, json.loads(value))
        self.use_plain_words()
        if self.eval_strategy != "no":
            self.do_eval = True
        if self.eval_strategy == "steps" and not self.eval_steps:
            self.eval_steps = self.logging_steps
        needs_metric = self.load_best_model_at_end or self.lr_scheduler_type in NEEDS_METRICS
        if needs_metric and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
        from rapidformer.dialects.huggingface.settings import check_arguments, read_mapping

        settings = check_arguments(self)
        options: Any = self.accelerator_config
        if options is not None:  # says it as well
            self.gradient_accumulation_steps = settings.gradient_accumulation_steps or 1
        if not dataclasses.is_dataclass(options):
            named = read_mapping(options, "accelerator_config", [])
            self.accelerator_config = AcceleratorOptions(**named)

    def __getattr__(self, name: str) -> Any:
        """transformers' ``set_training``, ``set_save`` ... only set fields, and these read them."""
        if not name.startswith("set_") and name not in ("get_warmup_steps", "to_sanitized_dict"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        from transformers import TrainingArguments as Theirs

        return functools.partial(getattr(Theirs, name), self)

    @property
    def world_size(self) -> int:
        number = int(os.environ.get("WORLD_SIZE") or 1)
        if number == 1:
            return number
        from rapidformer.dialects.huggingface.label_count import count_processes

        return count_processes(number)

    @property
    def process_index(self) -> int:
        return int(os.environ.get("RANK") or 0)

    @property
    def local_process_index(self) -> int:
        return int(os.environ.get("LOCAL_RANK") or 0)

    @property
    def device(self) -> torch.device:
        """Where this process computes; joins the other processes of the run."""
        from rapidformer.dist.processes import start_processes

        return start_processes(
            device="cpu" if self.use_cpu else "auto", timeout_minutes=self.ddp_timeout / 60
        ).device

    @property
    def n_gpu(self) -> int:
        """One GPU per process, as under any launcher."""
        return int(self.device.type == "cuda")

    @property
    def parallel_mode(self) -> Any:
        from transformers.training_args import ParallelMode

        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def train_batch_size(self) -> int:
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        return self.per_device_eval_batch_size

    @property
    def should_log(self) -> bool:
        return self.process_index == 0

    should_save = should_log

    def get_process_log_level(self) -> int:
        """A level of Python's ``logging``: the replicas are quieter."""
        return _LEVELS[self.log_level if self.process_index == 0 else self.log_level_replica]

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Let the first process (of each node) do something before the others, say fill a cache."""
        if self.world_size == 1:
            yield
            return
        import torch.distributed as dist

        _ = self.device  # joins the others
        index = self.local_process_index if local else self.process_index
        if index > 0:
            dist.barrier()
        try:
            yield
        finally:
            if index == 0:
                dist.barrier()

    def to_dict(self) -> dict[str, Any]:
        """Every field by name; tokens are masked."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        return {
            name: f"<{name.upper()}>" if name.endswith("_token") and value else _to_plain(value)
            for name, value in values.items()
        }

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    def __str__(self) -> str:
        """What differs from the defaults first: that is what one looks for."""
        changed = list_changed(self)
        lines = {name: f"    {name}={value!r}," for name, value in self.to_dict().items()}
        first = [lines[name] for name in changed if name in lines]
        rest = [lines[name] for name in sorted(lines) if name not in changed]
        return "\n".join([f"{type(self).__name__}(", *first, "    # defaults", *rest, ")"])

    __repr__ = __str__


@takes_former_names
@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """``TrainingArguments`` and how to generate in evaluation."""

    sortish_sampler: bool = False
    """Batches of similar length, as ``train_sampling_strategy="group_by_length"`` makes them."""
    predict_with_generate: bool = False
    """Whether evaluation generates text instead of looking at logits."""
    generation_max_length: int | None = None
    """Longest generated text in tokens (default: the model's own)."""
    generation_num_beams: int | None = None
    """Beams of the search (default: the model's own)."""
    generation_config: Any = None
    """A ``GenerationConfig``, a folder or a name on the Hub."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sortish_sampler and self.train_sampling_strategy == "random":
            self.train_sampling_strategy = "group_by_length"


for _former, _present in _FORMER_NAMES.items():
    _field = TrainingArguments.__dataclass_fields__[_present]
    _flags = {"aliases": [f"--{_former}", f"--{_former.replace('_', '-')}"], "action": _FormerFlag}
    _field.metadata = MappingProxyType({**_field.metadata, **_flags})
