"""Replay the model in a script's own loop: its passes, or else its blocks.

Such a loop calls the model where it likes, and calls ``engine.backward``: all calls between two
backward passes count as one forward pass. Whole steps are never replayed, since the loop's code is
not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rapidformer.accel.cuda_graph.graphs import LONG, GraphedPasses
from rapidformer.accel.cuda_graph.pieces import surround
from rapidformer.data.nested import iterate_tensors
from rapidformer.log import say_once
from rapidformer.overlay import list_layers, remove

_PROBLEM = "the loop around the model is your own"


class OwnLoop:
    """Tells the graphs of a model when a forward pass begins and ends."""

    def __init__(self, model: nn.Module, graphs: GraphedPasses) -> None:
        self.model, self._graphs = model, graphs
        self._is_training, self._is_over, self._is_inside = model.training, True, False
        self._has_begun = self._is_said = False
        if graphs.keep_to_pieces(_PROBLEM) is not None:
            surround(model, "passes", self)

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """A call of the model by the loop; one in another mode runs as it is."""
        is_same = self.model.training == self._is_training and torch.is_grad_enabled()
        if not is_same or self._is_inside:
            return run(*args, **kwargs)
        if not self._has_begun:
            self._has_begun = True
            self._check_size((args, kwargs))
        pieces = self._graphs.in_pieces
        if pieces is None or pieces.problem is not None:
            return run(*args, **kwargs)
        begins, self._is_over = self._is_over, False
        self._is_inside = True
        try:
            with pieces.passing(begins=begins):
                return run(*args, **kwargs)
        except BaseException:
            self._is_over = True  # a script that goes on calls the model anew
            raise
        finally:
            self._is_inside = False

    def _check_size(self, inputs: Any) -> None:
        tensors = [tensor for tensor in iterate_tensors(inputs) if tensor.dim()]
        rows = len(tensors[0]) if tensors else 0
        slots = max((t.numel() for t in tensors if not t.is_floating_point()), default=rows)
        if self._graphs.is_long(slots, rows):
            self._graphs.give_up_pieces(LONG)

    def end_pass(self) -> None:
        """A backward pass has run: the next call begins another forward pass."""
        self._is_over, self._is_training = True, self.model.training
        pieces = self._graphs.in_pieces
        if pieces is None or self._is_said:
            return
        if pieces.problem is not None:
            say_once(f"graphs    passes are not replayed as CUDA graphs: {pieces.problem}")
            self._is_said = True
        elif pieces.count:
            say_once(f"graphs    {pieces.description} are replayed as CUDA graphs from now on")
            self._is_said = True

    def close(self) -> None:
        """Let the model run as it did before."""
        if "passes" in list_layers(self.model):
            remove(self.model, "passes")
