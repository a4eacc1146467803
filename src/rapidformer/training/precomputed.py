"""``--precompute-reference``, and the proof that a resumed run has the reference of its first part.

A run's folder keeps ``reference/``: the checksums of the weights that it started from and, if they
are computed before training, the reference's answers by row number, each with a hash of its row.
Whatever disagrees is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rapidformer.checkpoint.frozen import Checksums
from rapidformer.checkpoint.publish import read_json, replace_text
from rapidformer.checkpoint.writing import run_on_first
from rapidformer.config import Settings
from rapidformer.data.batch import move_to_device
from rapidformer.data.collate import PadCollator
from rapidformer.data.data_source import add_to_digest, is_stream
from rapidformer.dist.collectives import broadcast_object, gather_from_all, gather_objects
from rapidformer.engine import RapidformerEngine
from rapidformer.engine.evaluation import run_batches
from rapidformer.engine.reference import Reference
from rapidformer.errors import CheckpointError, ConfigurationError, DataError, list_some
from rapidformer.log import get_logger
from rapidformer.objectives import Context, Objective
from rapidformer.objectives.reference import LOGPS, REFERENCE, get_reference_logprobs
from rapidformer.training import run_folder

_WEIGHTS = "weights.json"
_ROW = "reference_row"
_FLAG = "--precompute-reference"
_REMEDY = f"Delete it to compute them again, or leave out {_FLAG}."


class AnsweredRows:
    """A data set whose rows know the reference's answers, or their number until these are there."""

    def __init__(self, dataset: Any, name: str) -> None:
        if is_stream(dataset):
            raise ConfigurationError(f"{_FLAG} needs rows with numbers, and {name} is a stream.")
        self.dataset, self.name = dataset, name
        self.answers: Tensor | None = None
        """[rows of the data set, rows of a batch that each becomes]"""
        self.fingerprint = getattr(dataset, "fingerprint", None)
        self.sets = getattr(dataset, "sets", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self.dataset[number]
        if not isinstance(row, Mapping):
            raise ConfigurationError(
                f"{_FLAG} needs rows of named values; {self.name} has {type(row).__name__}."
            )
        more = {_ROW: number} if self.answers is None else {LOGPS: self.answers[number]}
        return {**row, **more}

    def hash_rows(self, rank: int, world_size: int) -> Tensor:
        """A hash of each row as the model reads it; every rank hashes some of them."""
        hashes = torch.empty(len(self), dtype=torch.long)
        for number in range(rank, len(self), world_size):
            digest = hashlib.sha256()
            add_to_digest(digest, self.dataset[number])
            hashes[number] = int.from_bytes(digest.digest()[:8], "big", signed=True)
        for place, part in enumerate(gather_from_all(hashes[rank::world_size])):
            hashes[place::world_size] = part
        return hashes


class AnswerCollator:
    """Puts what the rows know of the reference into the batch that another function makes."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self._collate = collate or PadCollator()

    def __call__(self, rows: list[Any]) -> Any:
        key = LOGPS if LOGPS in rows[0] else _ROW
        batch = self._collate([{k: v for k, v in row.items() if k != key} for row in rows])
        known = [torch.as_tensor(row[key]) for row in rows]
        return {**batch, key: torch.cat([value.reshape(-1) for value in known])}


def compute_answers(
    engine: RapidformerEngine,
    rows: AnsweredRows,
    collate: AnswerCollator,
    objective: Objective,
    reference: Reference,
) -> Tensor:
    """One pass over the rows; all answers, on every rank."""
    context = Context(frozen={REFERENCE: reference})
    loader = engine.data.build_loader(
        rows, collate, shuffle=False, batch_size=engine.args.eval_micro_batch_size,
        is_training=False,
    )  # fmt: skip

    def answer(batch: Any) -> dict[int, list[float]]:
        inputs, labels = objective.get_reference_inputs(move_to_device(batch, engine.device))
        logps = get_reference_logprobs(context, inputs, labels)
        numbers = batch[_ROW].tolist()
        return dict(zip(numbers, logps.view(len(numbers), -1).tolist(), strict=True))

    found: dict[int, list[float]] = {}
    with engine.model.evaluating():
        for micro_batch, answers in run_batches(loader, answer):
            if not micro_batch.is_filler:
                found |= answers
    for part in gather_objects(found, engine.runtime.topology):
        found |= part
    return torch.tensor([found[number] for number in range(len(rows))])


# ---- the run's folder ----------------------------------------------------------------------------


class ReferenceFolder:
    """What runs before and this one keep of a reference; nothing is kept without ``--save``."""

    def __init__(self, args: Settings, resume: Path | None) -> None:
        """``resume`` is the run, or the checkpoint of one, that goes on."""
        self._rank, self._world_size = args.rank, args.world_size
        self._target = None if args.save is None else Path(args.save) / run_folder.REFERENCE
        places = [] if resume is None else [resume, resume.parent]
        folders = [place / run_folder.REFERENCE for place in places]
        kept = next((folder for folder in folders if (folder / _WEIGHTS).is_file()), None)
        # As rank 0 sees it, which may be about to write such a file.
        self._source = broadcast_object(kept)

    def check_weights(self, found: Checksums) -> str:
        """Compare the weights with those of the run that goes on, and note them; their digest."""
        if self._source is None:
            text = json.dumps(found, sort_keys=True)
        else:
            saved = read_json(self._source / _WEIGHTS)
            text = json.dumps(saved, sort_keys=True)
            self._compare(saved, found)
        if (target := self._target) is not None and target != self._source:
            self._write(lambda: replace_text(target / _WEIGHTS, text))
        return hashlib.sha256(text.encode()).hexdigest()

    def _compare(self, saved: Mapping[str, Any], found: Checksums) -> None:
        # In another precision, a weight has other bits.
        changed = [
            name
            for name, (dtype, total) in found.items()
            if name not in saved or (saved[name][0] == dtype and saved[name][1] != total)
        ]
        if changed:
            raise CheckpointError(
                "the resumed run would have another reference: the weights that it starts from "
                f"are not those of {self._source}: {list_some(changed)} differ. Give the model of "
                "the first run (--pretrained-model-name-or-path), and its seed."
            )

    def load(self, rows: AnsweredRows, digest: str) -> Tensor | None:
        """The answers that an earlier part of the run has computed for these very rows."""
        file = None if self._source is None else self._source / f"{rows.name}.safetensors"
        if file is None or not file.is_file():
            return None
        try:
            with safe_open(file, "pt") as stored:
                answers: Tensor = stored.get_tensor("logps")
                hashes: Tensor = stored.get_tensor("hashes")
                weights = (stored.metadata() or {}).get("weights")
        except (SafetensorError, OSError) as reason:
            raise CheckpointError(f"{file} is damaged ({reason}). {_REMEDY}") from None
        if weights != digest:
            raise CheckpointError(f"{file} holds the answers of another reference. {_REMEDY}")
        if len(answers) != len(rows):
            raise DataError(
                f"{rows.name}: {file} has answers for {len(answers)} rows, and the data now has "
                f"{len(rows)}. {_REMEDY}"
            )
        changed = (self._hash(rows) != hashes).nonzero()
        if len(changed):
            raise DataError(
                f"{rows.name}, row {int(changed[0]) + 1}: it is not the row that {file} has the "
                f"reference's answer for. {_REMEDY}"
            )
        return answers

    def save(self, rows: AnsweredRows, answers: Tensor, digest: str) -> None:
        """Keep the answers for a resumed run."""
        if self._target is None or self._target == self._source:
            return
        file = self._target / f"{rows.name}.safetensors"
        tensors = {"logps": answers.contiguous(), "hashes": self._hash(rows)}

        def write() -> None:
            save_file(tensors, file.with_suffix(".tmp"), metadata={"weights": digest})
            file.with_suffix(".tmp").replace(file)

        self._write(write)

    def _write(self, action: Callable[[], None]) -> None:
        target = self._target
        assert target is not None

        def write() -> None:
            target.mkdir(parents=True, exist_ok=True)
            action()

        run_on_first(write, target)

    def _hash(self, rows: AnsweredRows) -> Tensor:
        return rows.hash_rows(self._rank, self._world_size)


def prepare_answers(
    engine: RapidformerEngine,
    data: Sequence[AnsweredRows],
    collate: AnswerCollator,
    objective: Objective,
    reference: Reference,
    folder: ReferenceFolder,
    digest: str,
) -> str:
    """Give all rows the reference's answers: kept ones, or those of a pass now; says which."""
    computed = 0
    for rows in data:
        answers = folder.load(rows, digest)
        if answers is None:
            get_logger().info("reference %s: %s rows", rows.name, f"{len(rows):,}")
            answers = compute_answers(engine, rows, collate, objective, reference)
            computed += len(rows)
        folder.save(rows, answers, digest)
        rows.answers = answers
    total = sum(map(len, data))
    kept = f", {total - computed:,} of them by an earlier part of the run" * (computed < total)
    return f"computed before training for {total:,} rows{kept}"
