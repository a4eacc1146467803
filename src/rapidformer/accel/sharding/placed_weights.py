"""Whole weights at fixed places, for passes of ZeRO-1 that are replayed as CUDA graphs.

``fully_shard`` gathers weights in hooks, each time into new memory: a replay runs no hooks, and
would read whatever is in the old memory by then. So while passes may be replayed, all weights are
gathered before an update, always to the same place; its passes run as if nothing were sharded, and
their gradients are summed and scattered afterwards. Passes without a graph do the same then: every
rank exchanges the same things in the same order, whether it replays or not.

ZeRO-1 has whole weights and whole gradients during an update anyway. Here the weights also stay
whole in memory between updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rapidformer.accel.sharding.gathered_weights import GatheredWeights
from rapidformer.compat.torch_fsdp import (
    bypass_hooks,
    free_memory,
    keep_memory,
    list_parameter_groups,
    make_root,
    reduce_whole_gradients,
)


class PlacedWeights:
    """The whole weights of a sharded model, gathered again for each update."""

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
        """Whether passes run on whole weights, and only ``reduce`` communicates."""
        self.gather()
        self.parameters: list[nn.Parameter] = [weight.unsharded_param for weight in self._weights]
        """The whole weights, in which backward passes leave gradients."""
        self.close()

    @property
    def shards(self) -> list[nn.Parameter]:
        """What the optimizer updates, in the order of ``parameters``."""
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
        """Before an update: the model has its whole weights until ``reduce`` or ``release``."""
        self._gathered.release()  # with what the user has changed since
        for weight in self._weights if not self._has_places else ():
            keep_memory(weight)
        self._has_places = True
        for module in self._gathered.modules:
            module.unshard()
        self._gathered.is_kept = self.is_gathered = True
        bypass_hooks(self._model)

    def assign(self, gradients: Sequence[Tensor | None]) -> None:
        """Give the whole weights the gradients that replayed passes have left."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def reduce(self) -> None:
        """Sum the gradients of all ranks; each shard gets its part, and the model its shards."""
        reduce_whole_gradients(self._model)
        self._gathered.is_kept = self.is_gathered = False

    def release(self) -> None:
        """Give the model its shards again, if an update was cut short."""
        if self.is_gathered:
            bypass_hooks(self._model, False)
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
