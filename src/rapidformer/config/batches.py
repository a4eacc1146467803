"""How many samples each update takes: a constant, or growing during the first part of the run.

``--rampup-batch-size 32 32 10000`` with ``--global-batch-size 128`` starts with 32 samples per
update and adds 32 after each third of the first 10,000 samples. The ramp is counted in samples, so
it means the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rapidformer.config.settings import Settings
from rapidformer.errors import count


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The global batch as a function of the samples consumed."""

    final: int
    start: int
    increment: int = 0
    ramp_samples: int = 0

    @property
    def is_constant(self) -> bool:
        return self.start == self.final

    def get_size(self, consumed: int) -> int:
        """Samples in the update that begins after this many samples."""
        if self.is_constant or consumed >= self.ramp_samples:
            return self.final
        steps = consumed * self._num_increments // self.ramp_samples
        return self.start + steps * self.increment

    def count_samples(self, updates: int) -> int:
        """Samples taken by the first `updates` updates."""
        consumed = 0
        for size, length in self._iterate_stages():
            taken = updates if length is None else min(updates, length)
            consumed += taken * size
            updates -= taken
            if not updates:
                break
        return consumed

    def count_updates(self, samples: int) -> int:
        """The fewest updates that take this many samples."""
        done = 0
        for size, length in self._iterate_stages():
            needed = -(-samples // size)
            if length is None or needed <= length:
                return done + max(needed, 0)
            done += length
            samples -= length * size
        raise AssertionError("the last stage has no end")

    @property
    def _num_increments(self) -> int:
        return (self.final - self.start) // self.increment

    def _iterate_stages(self) -> Iterator[tuple[int, int | None]]:
        """Sizes in order, each with its number of updates; the last has no end."""
        consumed = 0
        while (size := self.get_size(consumed)) != self.final:
            stage = (size - self.start) // self.increment
            # The first whole number of samples at which `get_size` moves past this stage.
            end = -(-self.ramp_samples * (stage + 1) // self._num_increments)
            length = -(-(end - consumed) // size)
            yield size, length
            consumed += length * size
        yield self.final, None


def get_batch_schedule(args: Settings) -> BatchSchedule:
    """The schedule described by checked settings."""
    final = args.global_batch_size or 1
    if args.rampup_batch_size is None:
        return BatchSchedule(final=final, start=final)
    start, increment, samples = args.rampup_batch_size
    return BatchSchedule(final=final, start=start, increment=increment, ramp_samples=samples)


def find_ramp_problems(args: Settings) -> Iterator[str]:
    """What is wrong with ``--rampup-batch-size``, once the other batch sizes are known."""
    ramp = args.rampup_batch_size
    if ramp is None:
        return
    given = f"--rampup-batch-size {' '.join(map(str, ramp))}"
    if len(ramp) != 3:
        yield f"{given} needs three numbers: the first batch size, the increment and the samples."
        return
    start, increment, _ = ramp
    final = args.global_batch_size or 1
    if min(ramp) < 1:
        yield f"{given}: every number must be at least 1."
        return
    if start > final or (final - start) % increment:
        yield (
            f"{given}: {start} must grow to --global-batch-size {final} in whole steps of "
            f"{increment}."
        )
    unit = (args.micro_batch_size or 1) * args.data_parallel_size
    if start % unit or (start != final and increment % unit):
        yield (
            f"{given}: the first batch size and the increment must be multiples of "
            f"--micro-batch-size {args.micro_batch_size} x "
            f"{count(args.data_parallel_size, 'data-parallel rank')} = {unit}."
        )
    if args.train_iters is None and args.train_samples is None and args.train_tokens is None:
        yield f"{given} needs --train-samples, --train-tokens or --train-iters."
