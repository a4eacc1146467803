"""Whole weights at fixed places, for passes of ZeRO-1 that are replayed as CUDA graphs.

``fully_shard`` gathers weights in hooks, each time into new memory: a replay would run no hook, and
find other weights in the old memory. So while passes may be replayed, all weights are gathered
before an update, always to the same place; its passes run as if nothing were sharded, and their
gradients are summed and scattered afterwards. Passes without a graph do the same then: every rank
exchanges the same things in the same order, whether it replays or not.

ZeRO-1 has whole weights and whole gradients during an update anyway. Here it also has the weights
between updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rapidformer.accel.sharding.gathered_weights import GatheredWeights
from rapidformer.compat.torch_fsdp import (
    free_memory,
    keep_memory,
    list_parameter_groups,
    make_root,
    pass_hooks_by,
    reduce_whole_gradients,
)


class PlacedWeights:
    """The whole weights of a sharded model, gathered for one update after the other."""

    def __init__(self, model: FSDPModule, gathered: GatheredWeights) -> None:
        """All ranks call this: it gathers the weights once."""
        self._model, self._gathered = model, gathered
        make_root(model)
        self._weights = [
            weight
            for module in gathered.modules
            for group in list_parameter_groups(module)
            for weight in group.fsdp_params
        ]
        self._has_places = False
        self.is_gathered = False
        """Whether passes run on whole weights, which nothing but ``reduce`` exchanges."""
        self.gather()
        self.parameters: list[nn.Parameter] = [weight.unsharded_param for weight in self._weights]
        """The whole weights, which a pass gives gradients."""
        self.close()

    @property
    def have_gradients(self) -> bool:
        """Whether the shards have gradients, to which those of the next update would be added."""
        return any(weight.sharded_param.grad is not None for weight in self._weights)

    def gather(self) -> None:
        """Before an update: the model has its whole weights until ``reduce`` or ``release``."""
        self._gathered.release()  # with what the user has changed since
        for weight in self._weights if not self._has_places else ():
            keep_memory(weight)
        self._has_places = True
        for module in self._gathered.modules:
            module.unshard()
        self._gathered.is_kept = self.is_gathered = True
        pass_hooks_by(self._model)

    def assign(self, gradients: Sequence[Tensor | None]) -> None:
        """Give the whole weights the gradients that replayed passes have left."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def reduce(self) -> None:
        """Sum the gradients of all ranks; each shard gets its part, and the model its shards."""
        reduce_whole_gradients(self._model)
        self._gathered.is_kept = self.is_gathered = False

    def release(self) -> None:
        """Give the model its shards again, if an update has not come to its end."""
        if self.is_gathered:
            pass_hooks_by(self._model, False)
            self._gathered.is_kept = self.is_gathered = False
            self._gathered.release()

    def close(self) -> None:
        """Give the memory back, until ``gather`` is called again."""
        if not self._has_places:
            return
        self._has_places = False
        self.release()
        self._gathered.release()  # also what other passes have gathered
        for weight in self._weights:
            free_memory(weight)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the model has its whole weights, and its parts may be called by themselves."""
        self.gather()
        try:
            yield
        finally:
            self.close()
