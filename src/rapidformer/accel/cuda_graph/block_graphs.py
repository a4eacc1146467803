"""Replay a model's blocks: their forward passes and their backward passes.

Blocks that pass their output straight to the next one are replayed together (``chains.py``).

Calls are noted in one forward pass, recorded before the next, and replayed from then on, by stack
of blocks (``stacks.py``). What a forward pass leaves for its backward pass lasts until that has
run, or until the forward pass of the next micro-batch.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from rapidformer.accel.cuda_graph.block_calls import (
    BlockCall,
    describe_mode,
    read_call,
)
from rapidformer.accel.cuda_graph.capture import CudaCapture, describe_error
from rapidformer.accel.cuda_graph.chains import CallKey, Following, Notes, View, build_chains
from rapidformer.accel.cuda_graph.columns import find_filling
from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.accel.cuda_graph.pieces import Pieces
from rapidformer.accel.cuda_graph.replayed_code import ReplayedCode
from rapidformer.accel.cuda_graph.snapshot import (
    HostNumbers,
    count_unused_numbers,
    get_numbers,
    set_numbers,
)
from rapidformer.accel.cuda_graph.stacks import Stack, StackPass, build_stacks
from rapidformer.accel.unpad.calls import Removal
from rapidformer.compat.torch_modules import (
    call_plainly,
    get_compiled_call,
    run_forward_hooks,
    set_compiled_call,
)
from rapidformer.config.effect import MOST_COPIED
from rapidformer.models.plan import runs_in_library_code
from rapidformer.models.side_effects.examination import Description
from rapidformer.overlay import find_fact

_MOST_CALLS = 8
"""How many calls of a block in one forward pass are recorded."""
_IS_TRAINED = operator.attrgetter("requires_grad")


def hash_places(parameters: Sequence[nn.Parameter]) -> int:
    """Where weights are in memory, and whether they are trained: a graph is valid for that."""
    return hash((*map(Tensor.data_ptr, parameters), *map(_IS_TRAINED, parameters)))


def _list_ways(model: nn.Module, names: Sequence[str]) -> list[tuple[nn.Module, str, nn.Module]]:
    """Every step of the ways from a model to some of its modules: from where, by which name."""
    steps = {}
    for name in names:
        above = model
        for part in name.split(".") if name else ():
            steps[above, part] = below = getattr(above, part)
            above = below
    return [(above, part, below) for (above, part), below in steps.items()]


def round_rows(model: nn.Module) -> None:
    """Let the number of real tokens be one of a few, if padding is removed and that is exact."""
    removal = find_fact(model, Removal)
    if removal is not None and removal.is_by_call:
        removal.is_on = False  # a graph knows a block's arguments only
    elif removal is not None and find_filling(model).fills:
        removal.rounds_up = True


def _call_block(
    reference: weakref.ref[BlockGraphs], block: nn.Module, run: Callable[..., Any], /,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Replay a block, or run it. A block outlives its engine: it must keep no graphs alive."""
    graphs = reference()
    return run(*args, **kwargs) if graphs is None else graphs.call(block, run, args, kwargs)


class SkippedBlocksError(NotRepeatableError):
    """Blocks that were recorded as one are called one by one."""

    def __init__(self) -> None:
        super().__init__(
            "the model has called only some of its blocks, which are replayed together as CUDA "
            "graphs. Set --cuda-graph off."
        )


class BlockGraphs(Pieces):
    """The graphs of all blocks of a model, in training."""

    most_chained: float = MOST_COPIED
    """In bytes of weights: the gradients of a chain lie in memory twice."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], capture: CudaCapture) -> None:
        super().__init__(model, capture, ReplayedCode((), nn.ModuleList(blocks)))
        self.blocks, self.description = blocks, f"the {len(blocks)} blocks"
        self._parameters = self._list_parameters()
        self._described: Description | None = None
        """What the blocks' code depended on at the last look."""
        names = {module: name for name, module in model.named_modules()}
        self._names = [names[block] for block in blocks]
        self._ways = _list_ways(model, self._names)
        self._may_chain = self._find_whether_chained()
        self._stacks = build_stacks(blocks, self._names, capture)
        """By block."""
        self._all_stacks = list(dict.fromkeys(self._stacks.values()))
        self._view: View | None = None
        """What blocks see in this call of the model; None: it cannot be replayed."""
        self._places: Hashable = None
        """Where the weights were when a pass began."""
        self._block_set = set(blocks)
        self._notes = Notes(self.device)
        """The calls of this pass that will be recorded after it."""
        self._host_numbers: HostNumbers
        """Those that the last pass began with."""
        self._following: Following | None = None
        self.calls: Counter[nn.Module] = Counter()
        self._undo = ExitStack()
        if self.problem is not None:
            return
        round_rows(model)
        for block in blocks:
            before = get_compiled_call(block)
            self._undo.callback(set_compiled_call, block, before)
            run = before if before is not None else functools.partial(call_plainly, block)
            call = functools.partial(_call_block, weakref.ref(self), block, run)
            set_compiled_call(block, call)

    def _list_parameters(self) -> list[nn.Parameter]:
        return [parameter for block in self.blocks for parameter in block.parameters()]

    def _find_whether_chained(self) -> bool:
        """Whether nothing but blocks touches hidden states: no pixels are added to some."""
        find_text: Any = getattr(getattr(self.model, "config", None), "get_text_config", None)
        is_text = find_text is not None and find_text() is self.model.config
        size = sum(parameter.nbytes for parameter in self._parameters)
        return (
            is_text
            and size <= self.most_chained
            and all(runs_in_library_code(self.model, name) for name in self._names)
        )

    @property
    def _skips_by_chance(self) -> bool:
        """Whether the last pass may have skipped blocks (LayerDrop), and the next one others."""
        try:
            self._host_numbers.count_unused(count_unused_numbers(self.model))
        except NotRepeatableError:
            return True
        return False

    @property
    def count(self) -> int:
        """For how many sizes blocks are replayed."""
        return max((stack.count for stack in self._all_stacks), default=0)

    def close(self) -> None:
        """Let blocks run as they did before."""
        super().close()
        self._undo.close()

    @contextmanager
    def passing(self, *, begins: bool = True) -> Iterator[None]:
        """Inside, the forward pass of a micro-batch runs or goes on; a backward pass follows."""
        try:
            with super().passing(begins=begins):
                yield
        except BaseException:
            self._following = None  # it says itself why the rest was not called
            raise
        finally:
            self._notes.forget_tensors()
            if self._notes.calls:
                self._notes.code = self._code.examination.describe()
        self._check_all_called()

    def begin(self) -> None:
        """Record what the last pass has noted: another one begins."""
        self._check_all_called()
        super().begin()
        for stack in self._all_stacks:
            last, stack.current = stack.current, None
            if last is not None and last.is_noted and self.problem is None:
                self._record(stack, last)
        self._notes = Notes(self.device)
        self._host_numbers = HostNumbers(has_device=self.device.type != "cpu")
        self.calls.clear()

    def _check_all_called(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            raise SkippedBlocksError

    def _record(self, stack: Stack, last: StackPass) -> None:
        """Record the calls that the last pass has noted."""
        now = get_numbers(self.device)
        before = self._code.take_snapshot(self.device)
        places = hash_places(self._parameters)  # what is recorded reads weights here
        noted = (call for call in self._notes.calls if self._stacks[call.key.block] is stack)
        calls = [call for call in noted if call.key.view.places == places]
        # What is recorded computes with the code's state of now.
        code, seen = self._code.examination.describe(), {call.key.view.code for call in calls}
        if len(seen) > 1 or self._notes.code != code:
            calls = [call for call in calls if call.key.view.code == code]
        if not calls:
            stack.forget(last)
            return
        may_chain = self._may_chain and not self._skips_by_chance
        chains = build_chains(calls, are_linked=may_chain)
        try:
            last.keep(chains, self.record(chains, stack.capture, before))
        except Exception as error:
            # Whatever it is, the blocks themselves run next: if they fail, too, the user sees that.
            self.give_up(describe_error(error))
            before.restore()
        set_numbers(now, self.device)

    def call(
        self, block: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Replay a block, or run it."""
        if not self.is_replayed(block):
            return run(*args, **kwargs)
        call = read_call(args, kwargs)
        following, self._following = self._following, None
        if following is not None and (call is None or not following.expects(block, call)):
            args, kwargs = following.recover(args, kwargs, self.device)
            return run(*args, **kwargs)
        if following is not None:
            self._following = following.step()
            return following.output
        if call is None:
            return run(*args, **kwargs)
        stack = self._stacks[block]
        if stack.current is None or block is stack.first:
            try:
                self._look()
            except NotRepeatableError as problem:
                self.give_up(str(problem))
                return run(*args, **kwargs)
        if self._view is None:
            return run(*args, **kwargs)
        if stack.current is None:
            stack.current = self._choose(stack, call, self._view)
        current = stack.current
        self.calls[block] += 1
        key = CallKey(block, self.calls[block], call.form, self._view)
        if current.is_noted and self.calls[block] <= _MOST_CALLS:
            return self._notes.run(key, run, call, is_linked=self._continues(stack))
        self._notes.end_chain()
        found = current.find(key)
        if found is None:
            return run(*args, **kwargs)
        chain, recorded, may_go_back = found
        self._code.note_replay()
        numbers = get_numbers(self.device)
        output = self.replay(recorded, call, numbers, may_go_back)
        if self._view.kept:
            run_forward_hooks(block, args, output)
        self._following = Following.start(chain, call, output, numbers)
        return output if self._following is None else chain.stand_in

    def _continues(self, stack: Stack) -> bool:
        """Whether a call may continue the chain of the call that was noted last."""
        if not self._notes.calls or self._view is None or self._view.kept:
            return False
        last = self._notes.calls[-1].key
        return self._stacks[last.block] is stack and last.view == self._view

    def _look(self) -> None:
        """See what this call of the model depends on; raises if nothing may be replayed."""
        code = self._code.describe()
        if code != self._described:  # weights may have been replaced
            self._described, self._parameters = code, self._list_parameters()
        # Hooks on parameters would run twice: inside a graph, too.
        self._code.check_hooks(self._parameters if self.learns else ())
        places = hash_places(self._parameters)
        is_whole = all(getattr(above, name) is below for above, name, below in self._ways)
        # Otherwise, something stands in a block's place.
        kept = self._code.find_kept(self._block_set) if is_whole else None
        self._view = None if kept is None else View(code, places, describe_mode(self.device), kept)

    def _choose(self, stack: Stack, call: BlockCall, view: View) -> StackPass:
        """The recordings of a stack for this pass, by its first block."""
        if view.places != self._places:  # weights were moved, frozen or unfrozen
            self._forget_recordings()
            self._places = view.places
        # The first pass may still set things up.
        return stack.choose(
            (call.form, view), is_rounded=call.is_rounded, may_record=self._number > 1
        )  # fmt: skip

    def _forget_recordings(self) -> None:
        for stack in self._all_stacks:
            stack.clear()

    def give_up(self, problem: str) -> None:
        """Run blocks as they are from now on."""
        super().give_up(problem)
        self._forget_recordings()
