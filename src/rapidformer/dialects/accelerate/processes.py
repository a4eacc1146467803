"""The part of ``Accelerator`` that tells processes apart, and lets them work apart."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch

from rapidformer.data.nested import iterate_tensors
from rapidformer.dist.collectives import gather_from_all, wait_for_all
from rapidformer.engine.engine import RapidformerEngine
from rapidformer.errors import RapidformerError

Function = Callable[..., Any]


class ProcessVerbs:
    """What this process is, and what only some processes do."""

    engine: RapidformerEngine
    _is_triggered = False

    @property
    def num_processes(self) -> int:
        return self.engine.args.world_size

    @property
    def process_index(self) -> int:
        return self.engine.args.rank

    @property
    def local_process_index(self) -> int:
        return int(os.environ.get("LOCAL_RANK") or 0)

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        return self.num_processes > 1

    multi_device = use_distributed

    def wait_for_everyone(self) -> None:
        wait_for_all()

    def print(self, *values: Any, **options: Any) -> None:
        """``print`` once per node."""
        if self.is_local_main_process:
            print(*values, **options)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process do something before the others, say fill a cache."""
        return self._let_first(is_first=self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """The same for the first process of each node."""
        return self._let_first(is_first=self.is_local_main_process)

    @contextmanager
    def _let_first(self, *, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        yield
        if is_first:
            self.wait_for_everyone()

    def on_main_process(self, function: Function) -> Function:
        """A function that does nothing on the other processes."""
        return _only_if(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Function) -> Function:
        """The same for the first process of each node."""
        return _only_if(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Function) -> Function:
        """The same for the last process."""
        return _only_if(lambda: self.is_last_process, function)

    def on_process(self, function: Function | None = None, process_index: int = 0) -> Any:
        """The same for any process: ``@accelerator.on_process(process_index=3)``."""
        if function is None:
            return lambda wrapped: self.on_process(wrapped, process_index)
        return _only_if(lambda: self.process_index == process_index, function)

    def on_local_process(
        self, function: Function | None = None, local_process_index: int = 0
    ) -> Any:
        """The same for a process of each node."""
        if function is None:
            return lambda wrapped: self.on_local_process(wrapped, local_process_index)
        return _only_if(lambda: self.local_process_index == local_process_index, function)

    def gather(self, values: Any) -> Any:
        """Every process's rows, each example of the data once; also of nested lists and dicts."""
        return _gather_nested(self.engine, values)

    def gather_for_metrics(self, values: Any, use_gather_object: bool = False) -> Any:
        """The same for the rows of the current batch.

        A loss (or a text) that was repeated ``batch_size`` times counts as often as a last, smaller
        batch has rows. A list of anything but tensors is joined as objects.
        """
        holds_objects = isinstance(values, list) and next(iterate_tensors(values), None) is None
        if use_gather_object or holds_objects:
            kept = self.engine.data.drop_surplus_items(list(values))
            return self.engine.data.gather_objects(kept)
        return _gather_nested(self.engine, self.engine.data.drop_surplus_rows(values))

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's part of a list, tuple, tensor or dictionary of them, in order.

        ``apply_padding`` repeats a shorter part's last item, so that all parts are equally long.
        """
        yield self._take_part(inputs, pads=apply_padding)

    def _take_part(self, inputs: Any, *, pads: bool) -> Any:
        if isinstance(inputs, dict):
            lengths = {len(value) for value in inputs.values()}
            if len(lengths) > 1:
                raise RapidformerError(
                    "split_between_processes(): all values of a dictionary must be equally long, "
                    f"got {', '.join(map(str, sorted(lengths)))}."
                )
            return {name: self._take_part(value, pads=pads) for name, value in inputs.items()}
        count, extra = divmod(len(inputs), self.num_processes)
        index = self.process_index
        start = index * count + min(index, extra)
        part = inputs[start : start + count + (index < extra)]
        missing = count + bool(extra) - len(part)
        if not pads or not missing or not len(inputs):
            return part
        last = part[-1:] if len(part) else inputs[-1:]
        if isinstance(part, torch.Tensor):
            return torch.cat([part, *[last] * missing])
        return part + last * missing

    def set_trigger(self) -> None:
        """Raise a flag that ``check_trigger`` of every process will see."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Whether any process has raised the flag since the last check; all must call this."""
        is_triggered = any(gather_from_all(self._is_triggered))
        self._is_triggered = False
        return is_triggered

    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Nothing to do: every process gets equally many batches, and fillers do not count."""
        return nullcontext()


def _only_if(is_so: Callable[[], bool], function: Function) -> Function:
    @wraps(function)
    def run(*values: Any, **options: Any) -> Any:
        return function(*values, **options) if is_so() else None

    return run


def _gather_nested(engine: RapidformerEngine, values: Any) -> Any:
    """Every process's rows of a tensor, or of each tensor in nested lists and dictionaries."""
    if isinstance(values, torch.Tensor):
        return engine.gather(values.detach())
    if isinstance(values, Mapping):
        return {name: _gather_nested(engine, value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(_gather_nested(engine, value) for value in values)
    raise RapidformerError(f"gather() takes tensors, got {type(values).__name__}.")
