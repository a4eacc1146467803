"""The part of ``Accelerator`` that tells processes apart, and lets them work apart."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from typing import Any

import torch

from rapidformer.data.nested import iterate_tensors, map_tensors
from rapidformer.dist.collectives import gather_from_all, gather_rows, sum_over_rows, wait_for_all
from rapidformer.engine.engine import RapidformerEngine
from rapidformer.errors import RapidformerError

Function = Callable[..., Any]


class DistributedType(enum.StrEnum):
    """How the processes of a run divide the work, in Accelerate's words."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MEGATRON_LM = "MEGATRON_LM"
    TPU = "TPU"
    XLA = "XLA"


def tell_accelerate(precision: str, device: torch.device, num_processes: int) -> None:
    """Let Accelerate's own ``AcceleratorState()`` see the same processes, if the script has it."""
    module = sys.modules.get("accelerate.state")
    if module is None or (num_processes == 1 and "LOCAL_RANK" in os.environ):
        return  # alone, it would start a process group of one
    from accelerate.utils import TorchDynamoPlugin

    options: dict[str, Any] = {"dynamo_plugin": TorchDynamoPlugin(), "_from_accelerator": True}
    with suppress(ValueError):  # that of an earlier Accelerator, with another precision, stays
        module.AcceleratorState(precision, cpu=device.type == "cpu", **options)


def refuse_own_gradient(gradient: torch.Tensor) -> None:
    """For a tensor hook: the gradient would stay on its process."""
    raise RapidformerError(
        "this model was prepared without its optimizer, and loss.backward() would leave each "
        "process with the gradient of its own rows. Call accelerator.prepare(model, optimizer) and "
        "accelerator.backward(loss); or freeze the model, if it only runs: "
        "model.requires_grad_(False)."
    )


class ProcessVerbs:
    """What this process is, and what only some processes do."""

    engine: RapidformerEngine
    deepspeed_plugin: Any
    _is_triggered = False

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def num_processes(self) -> int:
        return self.engine.args.world_size

    @property
    def process_index(self) -> int:
        return self.engine.args.rank

    @property
    def state(self) -> Any:
        """The same facts: ``accelerator.state.num_processes`` and so on."""
        return self

    @property
    def distributed_type(self) -> DistributedType:
        if self.deepspeed_plugin is not None:
            return DistributedType.DEEPSPEED
        if self.num_processes == 1:
            return DistributedType.NO
        if self.engine.args.zero_stage == 3:
            return DistributedType.FSDP
        is_gpu = self.device.type == "cuda"
        return DistributedType.MULTI_GPU if is_gpu else DistributedType.MULTI_CPU

    @property
    def mixed_precision(self) -> str:
        return self.engine.args.mixed_precision or "no"

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
        return self.on_process(function)

    def on_local_main_process(self, function: Function) -> Function:
        """The same for the first process of each node."""
        return self.on_local_process(function)

    def on_last_process(self, function: Function) -> Function:
        """The same for the last process."""
        return self.on_process(function, self.num_processes - 1)

    def on_process(self, function: Function | None = None, process_index: int = 0) -> Any:
        """The same for any process: ``@accelerator.on_process(process_index=3)``.

        A process that is alone does what each of them would do.
        """
        return self._only_if(lambda: self.process_index == process_index, function)

    def on_local_process(
        self, function: Function | None = None, local_process_index: int = 0
    ) -> Any:
        """The same for a process of each node."""
        return self._only_if(lambda: self.local_process_index == local_process_index, function)

    def _only_if(self, is_so: Callable[[], bool], function: Function | None) -> Any:
        if function is None:
            return lambda wrapped: self._only_if(is_so, wrapped)

        @wraps(function)
        def run(*values: Any, **options: Any) -> Any:
            is_alone = not self.use_distributed
            return function(*values, **options) if is_alone or is_so() else None

        return run

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the run, for what is computed outside the model."""
        return self.engine.runtime.precision.autocast(self.device)

    def gather(self, values: Any) -> Any:
        """Every process's rows, each example of the data once; also of nested lists and dicts."""
        return _gather_nested(self.engine, values)

    def gather_for_metrics(self, values: Any, use_gather_object: bool = False) -> Any:
        """The same for the rows of the current batch; a list without tensors is joined as objects.

        What was repeated ``batch_size`` times counts as often as a smaller batch has rows.
        """
        holds_objects = isinstance(values, list) and next(iterate_tensors(values), None) is None
        if use_gather_object or holds_objects:
            kept = self.engine.data.drop_surplus_items(list(values))
            return self.engine.data.gather_objects(kept)
        return _gather_nested(self.engine, self.engine.data.drop_surplus_rows(values))

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's part of a list, tuple, tensor, ``datasets.Dataset`` or dictionary of them.

        Padded by the last item of all. As in Accelerate, one process takes all, and any other
        sequence, such as a prompt, is for every process.
        """
        yield self._take_part(inputs, pads=apply_padding) if self.use_distributed else inputs

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
        end = start + count + (index < extra)
        missing = count + bool(extra) - (end - start) if pads and len(inputs) else 0
        if isinstance(inputs, torch.Tensor):
            part = inputs[start:end]
            return torch.cat([part, *[inputs[-1:]] * missing]) if missing else part
        if isinstance(inputs, (list, tuple)):
            sequence: Any = inputs
            return sequence[start:end] + sequence[-1:] * missing
        if _is_hub_data(inputs):
            return inputs.select([*range(start, end), *[len(inputs) - 1] * missing])
        return inputs

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, mean or maximum of a tensor over the processes; also of nested ones.

        ``scale`` is for TPUs, as in Accelerate.
        """
        if reduction not in ("sum", "mean", "max", "none"):
            raise RapidformerError(f"reduce(): sum, mean, max or none, not {reduction!r}.")
        if reduction == "none":
            return tensor
        return map_tensors(tensor, lambda _, each: self._reduce(each, reduction))

    def _reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        topology = self.engine.runtime.topology
        if reduction == "max":
            return gather_rows(tensor.detach()[None], topology).amax(dim=0)
        total = sum_over_rows(tensor.detach().clone(), topology)
        return total / self.engine.args.data_parallel_size if reduction == "mean" else total

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """A tensor padded to the longest of any process; also each of nested ones."""

        def pad(_: str, each: torch.Tensor) -> torch.Tensor:
            if each.dim() <= dim:
                return each
            missing = list(each.shape)
            missing[dim] = max(gather_from_all(each.shape[dim])) - each.shape[dim]
            filler = each.new_full(missing, pad_index)
            return torch.cat([filler, each] if pad_first else [each, filler], dim=dim)

        return map_tensors(tensor, pad)

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


def _is_hub_data(data: Any) -> bool:
    kind = getattr(sys.modules.get("datasets"), "Dataset", None)
    return kind is not None and isinstance(data, kind)


def _gather_nested(engine: RapidformerEngine, values: Any) -> Any:
    """Every process's rows of a tensor, or of each tensor in nested lists and dictionaries."""
    if isinstance(values, torch.Tensor):
        return engine.gather(values.detach())
    if isinstance(values, Mapping):
        return {name: _gather_nested(engine, value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        items = [_gather_nested(engine, value) for value in values]
        return type(values)(*items) if hasattr(values, "_fields") else type(values)(items)
    raise RapidformerError(f"gather() takes tensors, got {type(values).__name__}.")
