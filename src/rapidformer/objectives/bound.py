"""An objective with its model: the forward step that ``engine.run_update`` takes.

What a micro-batch must know of its whole update travels in its batch, under one key, so that a CUDA
graph and a pipeline see it like any other input. What the losses of its rows must know of all other
rows comes from a first pass over the update. It has no gradient. The second pass of each
micro-batch draws the random numbers of its first one again, so both see the same dropout masks, and
the run goes on as if there had been one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rapidformer.accel.fused_loss.noted import noting
from rapidformer.data.batch import IGNORED_LABEL, count_rows
from rapidformer.data.update import MicroBatch, Update, move_micro_batch
from rapidformer.dist.collectives import gather_rows, sum_over_rows
from rapidformer.dist.seeding import RandomState
from rapidformer.dist.topology import Topology
from rapidformer.errors import RapidformerError
from rapidformer.objectives.objective import AskedModel, Context, Count, Objective, Term, Terms
from rapidformer.objectives.reference import LOGPS, REFERENCE, get_reference_logprobs
from rapidformer.objectives.set_losses import compute_set_losses

_UPDATE = "rapidformer_update"
"""Key of a batch: what is known of its whole update."""
_MOST_ROWS = 2**24
"""More than a micro-batch can have: orders rows by micro-batch, then by their place in it."""


class ForwardResult(NamedTuple):
    """What a forward step returns to the engine, which counts a weight of None."""

    loss: Tensor
    weight: Count | None
    parts: Mapping[str, tuple[Tensor, Count | None]]
    """Means by name with what they were taken over; only shown."""


class BoundObjective:
    """Computes the loss of micro-batches with one model."""

    def __init__(
        self,
        objective: Objective,
        model: Any,
        frozen: Mapping[str, nn.Module | AskedModel] | None = None,
        evaluating: Callable[[], AbstractContextManager[None]] = torch.no_grad,
    ) -> None:
        """``evaluating`` is where ``Objective.expand`` runs."""
        self._objective = objective
        self._model = model
        self._evaluating = evaluating
        given = frozen or {}
        missing = [name for name in objective.frozen if name not in given]
        if missing:
            raise RapidformerError(
                f"{type(objective).__name__} needs a frozen model as {missing[0]!r}: return it "
                f"from provide_frozen_models() as {{{missing[0]!r}: model}}."
            )
        asked = {name: given[name] for name in objective.frozen}
        for module in asked.values():
            if isinstance(module, nn.Module):
                module.requires_grad_(False).eval()
        self.context = Context(frozen=asked)
        """What the objective is given besides the model and the batch."""
        self.set_losses: tuple[str, ...] = ()
        """The names under which the losses of a mixture's sets are shown."""
        self._weights: dict[str, float] = {}
        """The weights of the terms, if there are several."""

    @property
    def steps(self) -> Sequence[Callable[..., Any]]:
        """The code in it that may be the user's."""
        return self._objective.list_steps()

    @property
    def reads_no_padding(self) -> bool:
        """Whether nothing of what the model returns for padding is read."""
        return self._objective.reads_no_padding

    def __call__(self, batch: Any) -> ForwardResult:
        known: Mapping[str, Any] = {}
        if isinstance(batch, Mapping) and _UPDATE in batch:
            known = batch[_UPDATE]
            batch = {name: value for name, value in batch.items() if name != _UPDATE}
        context = self._get_context(known, batch)
        if "sets" not in known:
            terms = _name(self._objective.compute(self._model, batch, context))
            return self._combine(terms, known.get("factors"), batch)
        with noting() as notes:
            terms = _name(self._objective.compute(self._model, batch, context))
        result = self._combine(terms, known.get("factors"), batch)
        of_sets = compute_set_losses(terms, notes, known["sets"], self.set_losses)
        return result._replace(parts={**result.parts, **of_sets})

    def _get_context(self, known: Mapping[str, Any], batch: Any) -> Context:
        is_alone = "rows" not in known and self._objective.is_whole_alone
        if not self._objective.has_first_pass or is_alone:
            return self.context
        if "rows" not in known:  # outside of an update, a batch is one by itself
            given = self._objective.exchange(batch)
            alone = _with_rows(self.context, given) if given else self.context
            rows = _look(self._objective, self._model, batch, alone)
            return _with_rows(alone, rows, self._objective.summarize(rows))
        known["random"].restore()
        return replace(self.context, rows=known["rows"], places=known["places"])

    def _combine(
        self, terms: Terms, factors: Mapping[str, Tensor] | None, batch: Any
    ) -> ForwardResult:
        """One mean with its weight: what the engine back-propagates and divides by."""
        learnt = {name: term for name, term in terms.items() if term.weight}
        parts = {
            name: (term.mean.detach(), term.count)
            for name, term in terms.items()
            if len(learnt) > 1 or name not in learnt
        }
        if not learnt:
            raise RapidformerError(
                f"all terms of {type(self._objective).__name__} have weight 0: nothing is learnt."
            )
        first, *others = learnt.values()
        self._weights = {name: term.weight for name, term in learnt.items()} if others else {}
        if factors is None:
            loss = sum((_weigh(term) for term in others), start=_weigh(first))
            is_one_mean = all(_is_same(first.count, term.count) for term in others)
            if not is_one_mean and torch.is_grad_enabled():
                raise RapidformerError(
                    f"the terms {', '.join(learnt)} of {type(self._objective).__name__} are means "
                    "over different things: its method count(micro_batch) must return what each "
                    "of them is a mean over."
                )
            # In an evaluation, the means are reported one by one and joined at the end.
            return ForwardResult(loss, first.count if is_one_mean else count_rows(batch), parts)
        # Each term is a mean over other things. Rows carry them all: each micro-batch's share of a
        # sum is rescaled, so that dividing by the rows of the update divides it by its own count.
        rows = count_rows(batch)
        shares = [
            _weigh(term) * (factors[name] * _get_count(name, term) / rows).to(term.mean.dtype)
            for name, term in learnt.items()
        ]
        return ForwardResult(sum(shares[1:], start=shares[0]), rows, parts)

    def state_dict(self) -> dict[str, Any]:
        return self._objective.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._objective.load_state_dict(state)

    def combine_means(self, means: Mapping[str, float]) -> dict[str, float]:
        """The loss of an evaluation, from the means of its terms over all the data."""
        if not self._weights:
            return dict(means)
        total = sum(weight * means[name] for name, weight in self._weights.items())
        return {**means, "loss": total}

    # ---- the whole update ------------------------------------------------------------------------

    def prepare(self, update: Update, topology: Topology, device: torch.device) -> Update:
        """The update with what its micro-batches must know of each other in their batches."""
        if self._objective.expands:
            with self._evaluating():
                update = self._objective.expand(self._model, update, topology, device)
        if topology.pipeline > 1 and REFERENCE in self._objective.frozen:
            update = self._ask_reference(update, device)
        counts = [self._objective.count(micro_batch) for micro_batch in update]
        is_alone = len(update) == 1 and topology.get_group("data") is None
        looks = self._objective.has_first_pass and not (self._objective.is_whole_alone and is_alone)
        tells_sets = bool(self.set_losses) and not self._objective.expands
        if not (looks or counts[0] or tells_sets):
            return update
        if not all(isinstance(micro_batch.batch, Mapping) for micro_batch in update):
            raise RapidformerError(
                f"{type(self._objective).__name__} needs batches of named tensors, got "
                f"{type(update[0].batch).__name__}: let the collate function return a dictionary."
            )
        known: list[dict[str, Any]] = [{} for _ in update]
        if counts[0]:
            factors = self._sum_counts(update, counts, topology, device)
            known = [{"factors": factors} for _ in update]
        if looks:
            surveyed = _survey(self._objective, self._model, update, self.context, topology, device)
            known = [a | b for a, b in zip(known, surveyed, strict=True)]
        if tells_sets:
            of_rows = [_name_sets(each, len(self.set_losses), device) for each in update]
            known = [{**a, "sets": b} for a, b in zip(known, of_rows, strict=True)]
        micro_batches = tuple(
            micro_batch._replace(batch={**micro_batch.batch, _UPDATE: facts})
            for micro_batch, facts in zip(update, known, strict=True)
        )
        return replace(update, micro_batches=micro_batches)

    def _ask_reference(self, update: Update, device: torch.device) -> Update:
        """Ask the reference before the schedule: during it, the stages are busy with the model."""
        micro_batches = []
        for micro_batch in update:
            moved = move_micro_batch(micro_batch, device)
            inputs, labels = self._objective.get_reference_inputs(moved.batch)
            logps = moved.batch.get(LOGPS)
            if logps is None:
                logps = get_reference_logprobs(self.context, inputs, labels)
            micro_batches.append(moved._replace(batch={**moved.batch, LOGPS: logps}))
        return replace(update, micro_batches=tuple(micro_batches))

    @staticmethod
    def _sum_counts(
        update: Update, counts: Sequence[Mapping[str, Count]], topology: Topology,
        device: torch.device,
    ) -> dict[str, Tensor]:  # fmt: skip
        """For each term, the rows of the update over its count in the update."""
        names = sorted(counts[0])  # the same order on every rank
        table = [
            [0.0] * (len(names) + 1)
            if micro_batch.is_filler
            else [micro_batch.info.rows, *(counted[name] for name in names)]
            for micro_batch, counted in zip(update, counts, strict=True)
        ]
        if any(isinstance(value, Tensor) for line in table for value in line):
            lines = [[torch.as_tensor(v).to(device, torch.float64) for v in line] for line in table]
            totals = torch.stack([torch.stack(line) for line in lines]).sum(0)
        else:
            totals = torch.tensor(table, dtype=torch.float64, device="cpu").sum(0)
            if device.type == "cuda":
                totals = totals.pin_memory().to(device, non_blocking=True)
        totals = sum_over_rows(totals, topology)
        factors = totals[0] / totals[1:].clamp(min=1)
        return dict(zip(names, factors.unbind(), strict=True))


def _name(terms: Term | Terms) -> Terms:
    return {"loss": terms} if isinstance(terms, Term) else terms


def _name_sets(micro_batch: MicroBatch, num_sets: int, device: torch.device) -> Tensor:
    """The set of each sample; those of a filler belong to none."""
    sets = [num_sets] * len(micro_batch.sets) if micro_batch.is_filler else micro_batch.sets
    of_rows = torch.tensor(sets, device="cpu")
    return of_rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else of_rows


def _weigh(term: Term) -> Tensor:
    return term.mean if term.weight == 1.0 else term.mean * term.weight


def _is_same(count: Count | None, other: Count | None) -> bool:
    """Whether two counts are one, without asking the device."""
    return count is other or (not isinstance(count, Tensor) and count == other)


def _get_count(name: str, term: Term) -> Count:
    if term.count is None:
        raise RapidformerError(
            f"the term {name!r} of a loss with several counts must say its own: "
            "Term(mean, count), or Term.from_sum(total, count)."
        )
    return term.count


# ---- the first pass ----------------------------------------------------------------------------


def _survey(
    objective: Objective,
    model: Any,
    update: Update,
    context: Context,
    topology: Topology,
    device: torch.device,
) -> list[dict[str, Any]]:
    """For each micro-batch the rows of the whole update, its places in them, its random state."""
    if topology.pipeline > 1:
        raise RapidformerError(
            f"{type(objective).__name__} looks at the whole update before its losses, which a "
            "model in stages cannot do: use --tensor-model-parallel-size or "
            "--zero-3-memory-optimization instead of --pipeline-model-parallel-size."
        )
    batches = [move_micro_batch(micro_batch, device).batch for micro_batch in update]
    given = [objective.exchange(batch) for batch in batches]
    contexts = [context] * len(batches)
    if given[0]:
        rows, places = _gather(update, given, topology, device)
        contexts = [replace(context, rows=rows, places=place) for place in places]
    states, passes = [], []
    for batch, known in zip(batches, contexts, strict=True):
        states.append(RandomState(device))
        passes.append(_look(objective, model, batch, known))
    rows, places = _gather(update, passes, topology, device)
    shared = objective.summarize(rows)
    return [
        {"random": state, "rows": shared, "places": place}
        for state, place in zip(states, places, strict=True)
    ]


def _gather(
    update: Update, parts: Sequence[Mapping[str, Tensor]], topology: Topology, device: torch.device
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The rows of all micro-batches by name, and the places of each micro-batch in them."""
    counted = list(zip(update, parts, strict=True))
    sizes = [0 if micro_batch.is_filler else count_rows(rows) for micro_batch, rows in counted]
    numbers = [_MOST_ROWS * micro_batch.number + torch.arange(size, device=device)
               for micro_batch, size in zip(update, sizes, strict=True)]  # fmt: skip
    # In the order of the samples, so that nothing depends on who held which of them.
    everyone, order = gather_rows(torch.cat(numbers), topology).sort()

    def join(name: str) -> Tensor:
        mine = [rows[name][:size] for rows, size in zip(parts, sizes, strict=True)]
        is_padded = mine[0].dim() == 2 and not mine[0].is_floating_point()
        if is_padded:
            width = max(rows.shape[1] for rows in mine)
            mine = [pad(rows, (0, width - rows.shape[1]), value=IGNORED_LABEL) for rows in mine]
        padding = IGNORED_LABEL if is_padded else None
        return gather_rows(torch.cat(mine), topology, padding)[order]

    # A filler's loss does not count, but it is computed: in the place of other rows, of which there
    # may be fewer.
    stand_in = torch.arange(max(map(count_rows, parts)), device=device).clamp(max=len(order) - 1)
    places = [
        torch.searchsorted(everyone, mine) if size else stand_in[: count_rows(rows)]
        for mine, rows, size in zip(numbers, parts, sizes, strict=True)
    ]
    return {name: join(name) for name in parts[0]}, places


def _with_rows(
    context: Context, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor] | None = None
) -> Context:
    """The context of a batch that is an update by itself."""
    places = torch.arange(count_rows(rows), device=next(iter(rows.values())).device)
    return replace(context, rows=rows if shared is None else shared, places=places)


def _look(objective: Objective, model: Any, batch: Any, context: Context) -> Mapping[str, Tensor]:
    """The first pass of one micro-batch; running statistics must see a batch once."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.no_grad():
        rows = objective.first_pass(model, batch, context)
        for buffer, value in before:
            buffer.copy_(value)
    return rows
