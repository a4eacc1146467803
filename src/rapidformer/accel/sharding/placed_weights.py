"""Whole weights at fixed places, for passes that are replayed as CUDA graphs.

``fully_shard`` gathers weights in hooks, each time into new memory: a replay runs no hooks, and
would read whatever is in the old memory by then. So while passes may be replayed, all weights are
gathered before an update, always to the same place; its passes run as if nothing were sharded, and
their gradients are summed and scattered afterwards. Passes without a graph do the same then: every
rank exchanges the same things in the same order, whether it replays or not.

What is exchanged is a few flat tensors, which are laid out once: Python looks at single weights
only where passes run. ZeRO-1 has whole weights and whole gradients during an update anyway, the
other stages only here; the weights also stay whole in memory between updates.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rapidformer.accel.data_parallel import count_users
from rapidformer.accel.sharding.gathered_weights import GatheredWeights
from rapidformer.compat.torch_distributed import gather_flat, scatter_sum
from rapidformer.compat.torch_fsdp import (
    bypass_hooks,
    free_memory,
    keep_memory,
    list_padded_shards,
    list_parameter_groups,
    make_root,
    take_whole,
)
from rapidformer.compat.torch_tensors import copy_all
from rapidformer.optim.gradients import add_gradients, take_gradients
from rapidformer.optim.multi_tensor.tables import HOST, send

_MOST_BYTES = 2**28
"""Of whole weights that are exchanged at once."""

Gradients = Mapping[nn.Parameter, Tensor]
T = TypeVar("T")
S = TypeVar("S")


class PlacedWeights:
    """The whole weights of a sharded model, gathered again for each update."""

    def __init__(self, model: FSDPModule, gathered: GatheredWeights) -> None:
        """All ranks call this: it gathers the weights once."""
        assert isinstance(model, nn.Module)
        self._model, self._gathered = model, gathered
        make_root(model)
        self._weights = _list_weights(model, gathered.modules)
        self._gathers: list[_Gather] = []
        self._scatters: list[_Scatter] = []
        self._trained: list[bool] = []
        """Which weights may have gradients, and are in ``_scatters``."""
        self._has_places = False
        self.is_gathered = False
        """Whether passes run on whole weights, and only ``reduce`` communicates."""
        self.gather()
        self.parameters: list[nn.Parameter] = [weight.unsharded_param for weight in self._weights]
        """The whole weights, in which backward passes leave gradients."""
        self.close_places()

    @property
    def shards(self) -> list[nn.Parameter]:
        """What the optimizer updates, in the order of ``parameters``, which is the model's."""
        return [weight.sharded_param for weight in self._weights]

    @property
    def have_gradients(self) -> bool:
        """Whether the shards have gradients, to which those of the next update would be added."""
        return any(shard.grad is not None for shard in self.shards)

    @property
    def must_reduce(self) -> bool:
        """Whether a backward pass has left gradients that ``fully_shard`` knows nothing of.

        The second one of a forward step does so after the first has been reduced.
        """
        return self.is_gathered or any(p.grad is not None for p in self.parameters)

    def gather(self) -> None:
        """Before an update: fill the whole weights, with what the user has changed since."""
        self._gathered.release()
        if not self._has_places:
            self._open()
            return
        for gather in self._gathers:
            gather.run()
        self._follow_shards()

    def _open(self) -> None:
        for weight in self._weights:
            keep_memory(weight)
        self._has_places = True
        for module in self._gathered.modules:
            module.unshard()  # which takes the memory
        self._gathers = list(map(_Gather, _group(self._weights)))
        self._follow_shards()
        self._gathered.release()

    def _follow_shards(self) -> None:
        """Train the weights whose shards are trained now."""
        trained = [shard.requires_grad for shard in self.shards]
        if trained != self._trained:
            for weight, is_trained in zip(self._weights, trained, strict=True):
                weight.unsharded_param.requires_grad_(is_trained)
            self._lay_out(trained)

    def _lay_out(self, trained: list[bool]) -> None:
        self._trained = trained
        weights = itertools.compress(self._weights, trained)
        self._scatters = list(map(_Scatter, _group(weights)))

    def use(self) -> None:
        """Let passes run: the model has its whole weights until ``reduce`` or ``release``."""
        if self.is_gathered:
            return
        for module in self._gathered.modules:
            take_whole(module)
        self._gathered.is_kept = self.is_gathered = True
        bypass_hooks(self._model)

    def using(self, run_forward: Callable[[T], S]) -> Callable[[T], S]:
        """The same passes, which call ``use`` first."""

        def run(argument: T) -> S:
            self.use()
            return run_forward(argument)

        return run

    def place(self, gradients: Gradients) -> dict[nn.Parameter, Tensor]:
        """Copy whole gradients to where ``sum_placed`` takes them from; returns them there.

        A CUDA graph may record this. There, a gradient consists of a row for each rank, and may end
        with zeros.
        """
        placed: dict[nn.Parameter, Tensor] = {}
        for scatter in self._scatters:
            placed |= scatter.place(gradients)
        return placed

    def sum_placed(self, placed: Gradients, *, is_fixed: bool = True) -> dict[nn.Parameter, Tensor]:
        """Sum over the ranks what was placed; returns the gradients of the shards.

        Always at the same place if it ``is_fixed``.
        """
        self.release()
        sums: dict[nn.Parameter, Tensor] = {}
        for scatter in self._scatters:
            sums |= scatter.run(placed, is_fixed=is_fixed)
        return sums

    def reduce(self) -> None:
        """Sum the gradients that passes have left; each shard gets its part, and the model its
        shards.
        """
        pairs = zip(self.parameters, self._trained, strict=True)
        used = [p.requires_grad or p.grad is not None or is_trained for p, is_trained in pairs]
        if used != self._trained:  # the forward step has unfrozen some
            self._lay_out(used)
        left = zip(self.parameters, take_gradients(self.parameters), strict=True)
        gradients = {parameter: gradient for parameter, gradient in left if gradient is not None}
        self.place(gradients)
        sums = self.sum_placed(gradients, is_fixed=False)  # others may wait at the fixed place
        add_gradients(self.shards, [sums.get(parameter) for parameter in self.parameters])

    def release(self) -> None:
        """Give the model its shards again."""
        if self.is_gathered:
            bypass_hooks(self._model, False)
            self._gathered.is_kept = self.is_gathered = False
            self._gathered.release()

    def close_places(self) -> None:
        """Give the memory back, until ``gather`` is called again."""
        if not self._has_places:
            return
        self._has_places = False
        self.release()
        self._gathered.release()  # also what other passes have gathered
        self._gathers, self._scatters, self._trained = [], [], []
        for weight in self._weights:
            free_memory(weight)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the model has its whole weights, and its parts may be called by themselves."""
        self.gather()
        self.use()
        try:
            yield
        finally:
            self.close_places()


def _list_weights(model: nn.Module, modules: Sequence[FSDPModule]) -> list[Any]:
    """What ``fully_shard`` knows of each weight, in the order of the model's parameters."""
    known = {
        weight.sharded_param: weight
        for module in modules
        for group in list_parameter_groups(module)
        for weight in group.fsdp_params
    }
    weights = [known[parameter] for parameter in model.parameters()]
    assert len(weights) == len(known)
    return weights


def _group(weights: Iterable[Any]) -> list[list[Any]]:
    """What is exchanged together: weights of one dtype, up to some size."""
    groups: dict[torch.dtype, list[list[Any]]] = {}
    sizes: dict[torch.dtype, int] = {}
    for weight in weights:
        whole = weight.unsharded_param
        alike, size = groups.setdefault(whole.dtype, [[]]), sizes.get(whole.dtype, 0)
        if size >= _MOST_BYTES:
            alike.append([])
            size = 0
        alike[-1].append(weight)
        sizes[whole.dtype] = size + whole.nbytes
    return list(itertools.chain.from_iterable(groups.values()))


class _Gather:
    """Weights that are gathered together."""

    def __init__(self, weights: list[Any]) -> None:
        self._weights, self._sizes = weights, _list_sizes(weights)
        self._mesh = weights[0].mesh_info
        count = self._mesh.shard_mesh_size
        # By ``data``: gathering into a weight does not count as a change of it.
        self._memory = [weight.all_gather_outputs[0].data.view(count, -1) for weight in weights]

    @torch.no_grad()
    def run(self) -> None:
        """Fill the memory of the whole weights."""
        mesh, size = self._mesh, sum(self._sizes)
        rows = self._memory[0].new_empty(mesh.shard_mesh_size, size)
        mine = rows[mesh.shard_mesh_rank]
        copy_all(mine.split(self._sizes), list_padded_shards(self._weights))
        gather_flat(rows.view(-1), mine, mesh.shard_process_group)
        torch.split_with_sizes_copy(rows, self._sizes, 1, out=self._memory)


class _Scatter:
    """Gradients that are summed together: each rank gets its part of each."""

    def __init__(self, weights: list[Any]) -> None:
        self._weights, self._mesh = weights, weights[0].mesh_info
        self._parameters = [weight.unsharded_param for weight in weights]
        count, sizes = self._mesh.shard_mesh_size, [*_list_sizes(weights), len(weights)]
        self._starts = list(itertools.accumulate(sizes[:-1], initial=0))
        first = self._parameters[0].data
        self._rows = first.new_zeros(count, sum(sizes))
        """For each rank, its part of each gradient, and which of them are gradients."""
        *self._places, self._flags = self._rows.split(sizes, 1)
        self._pieces = [
            _cut(p, place) for p, place in zip(self._parameters, self._places, strict=True)
        ]
        self._part = first.new_empty(sum(sizes))
        self._gradients = self._cut(self._part)
        self._known_flags: dict[tuple[bool, ...], Tensor] = {}

    @torch.no_grad()
    def place(self, gradients: Gradients) -> dict[nn.Parameter, Tensor]:
        """Copy gradients to where ``run`` takes them from."""
        used = tuple(parameter in gradients for parameter in self._parameters)
        targets, sources = list(self._flags), [self._get_flags(used)] * len(self._flags)
        for parameter, pieces in zip(self._parameters, self._pieces, strict=True):
            if parameter in gradients:
                targets += pieces
                sources += gradients[parameter].chunk(len(self._rows))
            else:
                for piece in pieces:
                    piece.zero_()
        copy_all(targets, sources)
        pairs = zip(self._parameters, self._places, strict=True)
        return {parameter: place for parameter, place in pairs if parameter in gradients}

    def _get_flags(self, used: tuple[bool, ...]) -> Tensor:
        """On the device: a CUDA graph keeps reading them."""
        if used not in self._known_flags:
            flags = torch.tensor(used, dtype=self._rows.dtype, device=HOST)
            self._known_flags[used] = send(flags, self._rows.device)
        return self._known_flags[used]

    def run(self, placed: Gradients, *, is_fixed: bool) -> dict[nn.Parameter, Tensor]:
        """The sums over the ranks of what was placed: this rank's parts."""
        part = self._part if is_fixed else torch.empty_like(self._part)
        scatter_sum(part, self._rows.view(-1), self._mesh.shard_process_group)
        if hasattr(self._mesh, "replicate_process_group"):
            dist.all_reduce(part, group=self._mesh.replicate_process_group)
        gradients = self._gradients if is_fixed else self._cut(part)
        users = count_users(part[self._starts[-1] :], [p in placed for p in self._parameters])
        rows = zip(self._parameters, gradients, users, strict=True)
        return {parameter: gradient for parameter, gradient, count in rows if count > 0}

    def _cut(self, part: Tensor) -> list[Tensor]:
        """The gradient of each shard."""
        return [
            weight.to_sharded_dtensor(
                part.as_strided(weight.sharded_size, weight.contiguous_sharded_stride, start)
            )
            for weight, start in zip(self._weights, self._starts[:-1], strict=True)
        ]


def _list_sizes(weights: Iterable[Any]) -> list[int]:
    """How many numbers each rank holds, those included that make all ranks hold equally many."""
    return [weight.padded_sharded_param_size.numel() for weight in weights]


def _cut(parameter: Tensor, place: Tensor) -> list[Tensor]:
    """Views of the rows of a gradient, as ``chunk`` cuts it."""
    chunks = parameter.detach().chunk(len(place))
    return [
        row[: chunk.numel()].view(chunk.shape) for row, chunk in zip(place, chunks, strict=False)
    ]
