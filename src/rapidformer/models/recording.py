"""Build a model without its memory, recording what would have been done to each tensor.

Under ``record``, every tensor created on the CPU lives on ``meta``, and each operation that gives
it values becomes a step. Later any tensor can be created, alone and in any order, with exactly the
bits one process would have had: a step that draws random numbers remembers the generator's state
before it. Random steps do draw while recording, into memory that is discarded at once, because the
generator has to advance exactly as in a plain build.

Tensors are identified by their place in a piece of memory, never by the object. Parameters, views
and detached copies of one tensor are therefore the same thing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rapidformer.compat.torch_dispatch import (
    TorchDispatchMode,
    get_schema,
    tree_leaves,
    tree_map_only,
    without_torch_function,
)
from rapidformer.compat.torch_tensors import get_storage_key

Spans = Sequence[Sequence[tuple[int, int]]]
"""A part of a tensor: for each dimension, the ranges that belong to it, in order."""
_META, _CPU = torch.device("meta"), torch.device("cpu")
# Steps that leave nothing of the earlier values, if they cover the whole memory.
_OVERWRITING = {"normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "exponential_"}
_WITHOUT_VALUES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_ONLY_SHAPES = ("empty_like", "zeros_like", "ones_like", "full_like", "rand", "new_")
_CHANGES_MEMORY = {"set_", "resize_"}
_tensor_class: Any = Tensor
_GET_IS_META, _GET_DEVICE = _tensor_class.is_meta.__get__, _tensor_class.device.__get__


class RecordingError(Exception):
    """Something only a plain build can do."""


class PartialSource(Protocol):
    """A source of a whole tensor that can also be read in part, such as a file."""

    def __call__(self) -> Tensor: ...

    def read(self, spans: Spans) -> Tensor: ...


@dataclass(frozen=True)
class _View:
    """A tensor by its place in a piece of memory: views need no steps of their own."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Blank:
    """A tensor of which only the shape matters."""

    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class _Step:
    """An operation with its arguments; recorded tensors are identified by their place."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    results: list[_View]
    """New memory that the step returns; empty if it writes into existing memory."""
    random_state: Tensor | None
    overwrites: bool


def take(whole: Tensor, spans: Spans) -> Tensor:
    """The part of a tensor given by the spans."""
    for dim, stretches in enumerate(spans):
        if list(stretches) != [(0, whole.shape[dim])]:
            parts = [whole.narrow(dim, start, end - start) for start, end in stretches]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def _find_written(function: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that the operation writes into."""
    written = []
    for position, argument in enumerate(get_schema(function).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += list_tensors(value)
    return written


def list_tensors(values: Any) -> list[Tensor]:
    """Those among nested values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _takes_device(function: Any) -> bool:
    return any(argument.name == "device" for argument in get_schema(function).arguments)


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": _CPU} if "device" in kwargs else kwargs


def _describe(tensor: Tensor) -> _View:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return _View(get_storage_key(tensor), int(tensor.storage_offset()), shape, stride, tensor.dtype)


def _set_memory(memory: torch.UntypedStorage, place: _View) -> Tensor:
    """A tensor at this place of a piece of memory."""
    tensor = torch.empty(0, dtype=place.dtype)
    return tensor.set_(memory, place.offset, place.size, place.stride)


class Recording:
    """The steps of a build, and what can be created from them."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._writers: dict[int, list[int]] = defaultdict(list)
        # Kept alive: the address of a freed tensor could be reused.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._scratch: torch.UntypedStorage | None = None

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor was recorded."""
        return tensor.is_meta and get_storage_key(tensor) in self._storages

    def has_values(self, tensor: Tensor) -> bool:
        """Whether some step has given it values; otherwise it cannot be created."""
        return self.holds(tensor) and bool(self._writers[get_storage_key(tensor)])

    def read(self, tensor: Tensor, spans: Spans | None = None) -> Tensor:
        """The tensor's values, or a part of them; from a file, only that part is read."""
        view = _describe(tensor)
        if spans is not None:
            source = self._find_source(view)
            if source is not None:
                return source.read(spans).to(view.dtype)
        whole = self._make(view)
        return whole if spans is None else take(whole, spans)

    def add_source(self, source: PartialSource, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A recorded tensor whose values come from elsewhere."""
        tensor = torch.empty(tuple(size), dtype=dtype, device=_META)
        self._add_storage(tensor)
        self._add(_Step(source, (), {}, [_describe(tensor)], None, overwrites=True), [tensor])
        return tensor

    # ---- recording -----------------------------------------------------------------------------

    def run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operation of the build: run on ``meta`` and recorded, or run as it is."""
        if not self._concerns(function, list_tensors((args, kwargs)), kwargs):
            return function(*args, **kwargs)
        name = get_schema(function).name.partition("::")[2]
        written = _find_written(function, args, kwargs)
        gives_tensors = any("Tensor" in str(value.type) for value in get_schema(function).returns)
        if not gives_tensors or any(not tensor.is_meta for tensor in written):
            return function(*self._realize(args), **self._realize(kwargs))
        if name in _CHANGES_MEMORY or kwargs.get("generator") is not None:
            raise RecordingError(f"{name} with memory or random numbers of its own")
        state = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            state = torch.get_rng_state()
            self._draw(function, args, kwargs, written)
        options = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        options |= {"device": _META} if _takes_device(function) else {}
        meta_args, options = tree_map_only(
            Tensor, lambda t: t if t.is_meta else t.to(_META), (args, options)
        )
        try:
            output = function(*meta_args, **options)
        except NotImplementedError:  # the shape depends on the values
            return function(*self._realize(args), **self._realize(kwargs))
        new = [tensor for tensor in list_tensors(output) if not self.holds(tensor)]
        if not new and not written:
            return output  # a view
        args, kwargs = tree_map_only(Tensor, lambda t: self._freeze(name, t), (args, kwargs))
        for tensor in new:
            self._add_storage(tensor)
        if name not in _WITHOUT_VALUES:
            covers = [t.numel() * t.element_size() == t.untyped_storage().nbytes() for t in written]
            results = [_describe(tensor) for tensor in new]
            overwrites = not written or (name in _OVERWRITING and all(covers))
            step = _Step(function, args, _on_cpu(kwargs), results, state, overwrites)
            self._add(step, [*new, *written])
        return output

    def _concerns(self, function: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
        if any(self.holds(tensor) for tensor in tensors):
            return True
        device = kwargs.get("device")
        is_cpu = device is not None and torch.device(device).type == "cpu"
        if not tensors:
            return _takes_device(function) and (device is None or is_cpu)
        return is_cpu and any(tensor.is_meta for tensor in tensors)

    def _draw(self, function: Any, args: Any, kwargs: Any, written: list[Tensor]) -> None:
        """Advance the generator as the step would have."""
        places = {id(tensor) for tensor in written}

        def get(tensor: Tensor) -> Tensor:
            if len(places) == 1 and id(tensor) in places:
                # Reused: thousands of pieces would not be returned to the system.
                size = tensor.untyped_storage().nbytes()
                if self._scratch is None or self._scratch.nbytes() < size:
                    self._scratch = torch.UntypedStorage(size, device="cpu")
                return _set_memory(self._scratch, replace(_describe(tensor), offset=0))
            if id(tensor) in places or not self.holds(tensor):
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            return self.read(tensor)

        args, kwargs = tree_map_only(Tensor, get, (args, kwargs))
        function(*args, **_on_cpu(kwargs))

    def _freeze(self, name: str, tensor: Tensor) -> Any:
        if self.holds(tensor):
            return _describe(tensor)
        if not tensor.is_meta:
            return tensor.detach().clone()
        if not name.startswith(_ONLY_SHAPES):
            raise RecordingError(f"{name} of a tensor that was made without values")
        return _Blank(tuple(tensor.shape), tensor.dtype)

    def _add_storage(self, tensor: Tensor) -> None:
        self._storages[get_storage_key(tensor)] = tensor.untyped_storage()

    def _add(self, step: _Step, changed: list[Tensor]) -> None:
        self._steps.append(step)
        for key in {get_storage_key(tensor) for tensor in changed}:
            self._writers[key].append(len(self._steps) - 1)

    def _realize(self, values: Any) -> Any:
        return tree_map_only(Tensor, lambda t: self.read(t) if self.holds(t) else t, values)

    # ---- creating ------------------------------------------------------------------------------

    def _find_source(self, view: _View) -> PartialSource | None:
        """The source of the tensor if it comes from there unchanged, except for its type."""
        steps = [self._steps[i] for i in self._find_steps(view.storage, len(self._steps))]
        if len(steps) != 1 or steps[0].results[:1] != [view]:
            return None
        step = steps[0]
        if hasattr(step.function, "read"):
            return cast(PartialSource, step.function)
        name = getattr(get_schema(step.function), "name", "")
        earlier = step.args[0] if step.args else None
        if name not in ("aten::_to_copy", "aten::clone") or not isinstance(earlier, _View):
            return None
        is_same = earlier.size == view.size and earlier.stride == view.stride
        return self._find_source(earlier) if is_same else None

    def _find_steps(self, storage: int, before: int) -> list[int]:
        """The steps behind a piece of memory's values at some point of the build."""
        writers = [number for number in self._writers[storage] if number < before]
        wholes = [place for place, number in enumerate(writers) if self._steps[number].overwrites]
        return writers[wholes[-1] :] if wholes else writers

    def _collect(self, storage: int, before: int, needed: set[int]) -> None:
        for number in self._find_steps(storage, before):
            if number in needed:
                continue
            needed.add(number)
            step = self._steps[number]
            for view in tree_leaves((step.args, step.kwargs)):
                if isinstance(view, _View) and view.storage != storage:
                    self._collect(view.storage, number, needed)

    def _make(self, wanted: _View) -> Tensor:
        needed: set[int] = set()
        self._collect(wanted.storage, len(self._steps), needed)
        memory: dict[int, torch.UntypedStorage] = {}

        def get(view: _View) -> Tensor:
            if view.storage not in memory:
                size = self._storages[view.storage].nbytes()
                memory[view.storage] = torch.UntypedStorage(size, device="cpu")
            return _set_memory(memory[view.storage], view)

        state = torch.get_rng_state()
        with torch.no_grad():
            for number in sorted(needed):
                self._repeat(self._steps[number], get, memory)
        torch.set_rng_state(state)
        return get(wanted)

    def _repeat(
        self, step: _Step, get: Callable[[_View], Tensor], memory: dict[int, torch.UntypedStorage]
    ) -> None:
        if step.random_state is not None:
            torch.set_rng_state(step.random_state)
        args, kwargs = tree_map_only(_View, get, (step.args, step.kwargs))
        args, kwargs = tree_map_only(
            _Blank, lambda blank: torch.empty(blank.size, dtype=blank.dtype), (args, kwargs)
        )
        output = step.function(*args, **kwargs)
        for view, tensor in zip(step.results, list_tensors(output), strict=False):
            if tensor.stride() != view.stride:
                tensor = torch.empty_strided(view.size, view.stride, dtype=view.dtype).copy_(tensor)
            memory[view.storage] = tensor.untyped_storage()


class _Recorder(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the names are torch's
        with without_torch_function():
            return self.recording.run(func, args, dict(kwargs or {}))


class _Disguise(TorchFunctionMode):
    """Makes recorded tensors look real: much code skips ``meta`` tensors."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_GET_IS_META, _GET_DEVICE) and self.recording.holds(args[0]):
            return _CPU if func == _GET_DEVICE else False
        if func is Tensor.__setitem__ and _fills_view(*args) and self.recording.holds(args[0]):
            # torch makes a tensor of the number where no mode sees it: without a value, on meta.
            return args[0][args[1]].fill_(args[2])
        return func(*args, **(kwargs or {}))


def _fills_view(tensor: Tensor, index: Any, value: Any) -> bool:
    """Whether ``tensor[index] = value`` writes one number to a view."""
    places = index if isinstance(index, tuple) else (index,)
    is_basic = all(
        isinstance(place, (int, slice, EllipsisType)) and not isinstance(place, bool)
        for place in places
    )
    return is_basic and isinstance(value, (bool, int, float))


@contextmanager
def record() -> Iterator[Recording]:
    """Build inside this context, without memory; the recording then creates what is requested."""
    recording = Recording()
    with _Recorder(recording), _Disguise(recording):
        yield recording
    recording._scratch = None  # only recording needs it
