"""The loader: every sample once, one global order, exact resuming, random numbers of its own."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import Dataset, IterableDataset

from rapidformer.data import fetching
from rapidformer.data.loader import DistributedLoader
from rapidformer.data.rounds import GroupedOrder
from rapidformer.data.update import MicroBatch
from rapidformer.errors import DataError


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def as_tensor(rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def build(dataset: Any, micro: int = 2, **options: Any) -> DistributedLoader:
    options.setdefault("collate", as_tensor)
    return DistributedLoader(dataset, micro_batch_size=micro, **options)


Round = tuple[list[int], int, bool]


def take_epoch(loader: DistributedLoader, limit: int | None = None) -> list[Round]:
    """(samples, rows counted, ends an update) of each round."""
    rounds: list[Round] = []
    for each in loader.iterate_micro_batches():
        rounds.append((each.batch.tolist(), each.info.rows, each.is_last))
        if len(rounds) == limit:
            break
    return rounds


def join(replicas: list[list[Round]]) -> list[list[int]]:
    """Samples of each round over all replicas, fillers left out."""
    return [
        [sample for samples, rows, _ in parts for sample in samples[:rows]]
        for parts in zip(*replicas, strict=True)
    ]


shapes = {
    "count": st.integers(1, 40),
    "micro": st.integers(1, 4),
    "replicas": st.integers(1, 4),
    "per_update": st.integers(1, 3),
    "shuffle": st.booleans(),
}


@settings(max_examples=60, deadline=None)
@given(**shapes)
def test_every_sample_is_seen_exactly_once_an_epoch(
    count: int, micro: int, replicas: int, per_update: int, shuffle: bool
) -> None:
    parts = [
        take_epoch(
            build(
                Numbers(count),
                micro,
                num_replicas=replicas,
                replica=replica,
                rounds_per_update=per_update,
                shuffle=shuffle,
                seed=3,
            )
        )
        for replica in range(replicas)
    ]
    assert len({len(part) for part in parts}) == 1, "all replicas run equally often"
    ends = [[is_end for _, _, is_end in part] for part in parts]
    assert all(flags == ends[0] for flags in ends), "all replicas update together"
    assert ends[0][-1], "the last round of an epoch ends its update"
    assert [i for i, is_end in enumerate(ends[0][:-1], start=1) if is_end] == [
        i for i in range(1, len(ends[0])) if i % per_update == 0
    ]
    seen = [sample for samples in join(parts) for sample in samples]
    assert sorted(seen) == list(range(count))
    if not shuffle:
        assert seen == list(range(count))
    for part in parts:
        for samples, rows, _ in part:
            assert samples, "a filler is a batch too"
            assert rows in (0, len(samples))
            assert len(samples) <= micro


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 40),
    micro=st.sampled_from([1, 2, 4]),
    replicas=st.sampled_from([1, 2, 4]),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_order_does_not_depend_on_how_the_global_batch_is_split(
    count: int, micro: int, replicas: int, shuffle: bool, drop_last: bool
) -> None:
    global_batch = 16
    if drop_last and count < global_batch:
        count += global_batch

    def updates(micro: int, replicas: int) -> list[list[int]]:
        per_update = global_batch // (micro * replicas)
        options = {
            "num_replicas": replicas,
            "rounds_per_update": per_update,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "seed": 5,
        }
        parts = [
            take_epoch(build(Numbers(count), micro, replica=r, **options)) for r in range(replicas)
        ]
        samples = [sample for row in join(parts) for sample in row]
        return [samples[i : i + global_batch] for i in range(0, len(samples), global_batch)]

    one = updates(global_batch, 1)
    assert updates(micro, replicas) == one
    total = sum(len(update) for update in one)
    assert total == (count // global_batch * global_batch if drop_last else count)


@settings(max_examples=60, deadline=None)
@given(**shapes, position=st.integers(0, 50), epoch=st.integers(0, 2))
def test_resuming_anywhere_gives_exactly_the_rest(
    count: int,
    micro: int,
    replicas: int,
    per_update: int,
    shuffle: bool,
    position: int,
    epoch: int,
) -> None:
    def make() -> DistributedLoader:
        return build(
            Numbers(count),
            micro,
            num_replicas=replicas,
            replica=replicas - 1,
            rounds_per_update=per_update,
            shuffle=shuffle,
        )

    whole = make()
    for _ in range(epoch):
        take_epoch(whole)
    stop = min(position, len(whole))
    state = whole.state_dict()
    rest: list[Round] = []
    for done, each in enumerate(whole.iterate_micro_batches(), start=1):
        if done <= stop:
            state = whole.state_dict()
        else:
            rest.append((each.batch.tolist(), each.info.rows, each.is_last))
    rest += take_epoch(whole)  # and the whole of the next epoch
    resumed = make()
    resumed.load_state_dict(state)
    found = take_epoch(resumed)
    if stop < len(whole):
        found += take_epoch(resumed)
    assert found == rest


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 40),
    before=st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)]),
    after=st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)]),
    updates=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_resuming_on_other_processes_at_an_update_border(
    count: int,
    before: tuple[int, int],
    after: tuple[int, int],
    updates: int,
    shuffle: bool,
) -> None:
    global_batch = 8

    def make(micro: int, replicas: int) -> list[DistributedLoader]:
        return [
            build(
                Numbers(count),
                micro,
                num_replicas=replicas,
                replica=replica,
                rounds_per_update=global_batch // (micro * replicas),
                shuffle=shuffle,
                seed=1,
            )
            for replica in range(replicas)
        ]

    first = make(*before)[0]
    state, done = first.state_dict(), 0
    for _ in first.iterate_updates():
        if done < updates:
            state, done = first.state_dict(), done + 1
    assert state["consumed_samples"] == min(done * global_batch, count)
    whole = [sample for row in join([take_epoch(part) for part in make(*after)]) for sample in row]
    resumed = make(*after)
    for loader in resumed:
        loader.load_state_dict(state)
    rest = [sample for row in join([take_epoch(part) for part in resumed]) for sample in row]
    is_over = done * global_batch >= count
    assert sorted(rest) == sorted(range(count) if is_over else whole[done * global_batch :])
    if not is_over:
        assert rest == whole[done * global_batch :]
        assert resumed[0].epoch == 1


class ShuffledStream(Stream):
    """Draws its order while it is read, as a shuffle buffer without a seed does."""

    def __iter__(self) -> Iterator[int]:
        rows = list(range(self.count))
        while rows:
            yield rows.pop(random.randrange(len(rows)))


@pytest.mark.parametrize("data", [Numbers(40), Stream(40), ShuffledStream(40)])
@pytest.mark.parametrize("before", [4, 12])
@pytest.mark.parametrize("after", [(8, 1, 1), (8, 2, 1), (4, 1, 4), (5, 1, 2)])
def test_the_very_next_sample_follows_whatever_the_batch_size(
    data: Any, before: int, after: tuple[int, int, int]
) -> None:
    """12 samples are done. A round of 8 or 16 used to begin at 16, and 12 to 15 were lost."""
    micro, replicas, per_update = after
    shuffle = isinstance(data, Numbers)
    first = build(data, before, shuffle=shuffle)
    order = [sample for samples, _, _ in take_epoch(first) for sample in samples]
    first.rewind()
    take_epoch(first, limit=12 // before)
    resumed = [
        build(
            data, micro, num_replicas=replicas, replica=replica, rounds_per_update=per_update,
            shuffle=shuffle,
        )
        for replica in range(replicas)
    ]  # fmt: skip
    for loader in resumed:
        loader.load_state_dict(first.state_dict())
    rounds = [take_epoch(loader) for loader in resumed]
    assert [sample for row in join(rounds) for sample in row] == order[12:]
    assert [is_last for _, _, is_last in rounds[0]][:per_update].index(True) == per_update - 1


def test_an_order_by_length_stays_the_same_with_another_batch_size() -> None:
    def make(micro: int) -> DistributedLoader:
        lengths = [number * 7 % 40 for number in range(40)]
        return build(Numbers(40), micro, order=GroupedOrder(lengths, micro))

    first = make(4)
    order = [sample for samples, _, _ in take_epoch(first) for sample in samples]
    first.rewind()
    take_epoch(first, limit=3)
    resumed = make(8)
    resumed.load_state_dict(first.state_dict())
    assert [sample for samples, _, _ in take_epoch(resumed) for sample in samples] == order[12:]


def test_lengths() -> None:
    loader = build(Numbers(21), 2, num_replicas=2, rounds_per_update=2)
    assert (len(loader), loader.updates_per_epoch, loader.samples_per_round) == (6, 3, 4)
    loader = build(Numbers(21), 2, num_replicas=2, rounds_per_update=2, drop_last=True)
    assert (len(loader), loader.updates_per_epoch) == (4, 2)


def test_filler_counts_for_nothing() -> None:
    def collate(rows: list[int]) -> dict[str, torch.Tensor]:
        ids = torch.tensor(rows)[:, None].repeat(1, 3)
        return {"input_ids": ids, "labels": ids}

    loaders = [
        build(Numbers(5), 2, num_replicas=3, replica=replica, collate=collate)
        for replica in range(3)
    ]
    infos = []
    for loader in loaders:
        (only,) = loader.iterate_micro_batches()
        infos.append(only.info)
    assert [info.rows for info in infos] == [2, 2, 1]
    loaders = [
        build(Numbers(4), 2, num_replicas=3, replica=replica, collate=collate)
        for replica in range(3)
    ]
    (filler,) = loaders[2].iterate_micro_batches()
    assert filler.is_filler and filler.is_last
    assert filler.batch["input_ids"].tolist() == [[0, 0, 0]]
    info = filler.info
    assert (info.rows, info.labels, info.shifted_labels, info.tokens, info.slots) == (0, 0, 0, 0, 3)


def test_epochs_are_shuffled_differently_and_repeatably() -> None:
    first, second = (
        build(Numbers(30), shuffle=True, seed=1),
        build(Numbers(30), shuffle=True, seed=1),
    )
    epochs = [take_epoch(first) for _ in range(3)]
    assert epochs == [take_epoch(second) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert take_epoch(build(Numbers(30), shuffle=True, seed=2)) != epochs[0]


def test_leaving_early_and_iterating_again_starts_the_next_epoch() -> None:
    loader = build(Numbers(12), shuffle=True, seed=1)
    reference = build(Numbers(12), shuffle=True, seed=1)
    expected = [take_epoch(reference) for _ in range(3)]
    assert take_epoch(loader, limit=2) == expected[0][:2]
    assert loader.epoch == 0
    assert take_epoch(loader) == expected[1]
    assert take_epoch(loader) == expected[2]
    assert loader.epoch == 3


def test_leaving_after_a_resume_starts_the_next_epoch_too() -> None:
    loader = build(Numbers(12), shuffle=True, seed=1)
    expected = [take_epoch(loader) for _ in range(2)]
    resumed = build(Numbers(12), shuffle=True, seed=1)
    resumed.load_state_dict({"epoch": 0, "consumed_samples": 4})
    assert take_epoch(resumed, limit=1) == expected[0][2:3]
    assert take_epoch(resumed) == expected[1]


def test_rewind_starts_from_the_first_sample() -> None:
    loader = build(Numbers(12), shuffle=True)
    first = take_epoch(loader)
    take_epoch(loader, limit=2)
    loader.rewind()
    assert take_epoch(loader) == first


def test_a_follower_sees_each_micro_batch_before_it_is_handed_out() -> None:
    loader = build(Numbers(5), 2)
    seen: list[tuple[int, bool, int]] = []

    def follow(micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for each in micro_batches:
            seen.append((each.info.rows, each.is_last, loader.consumed_samples))
            yield each

    loader.follow = follow
    for number, _ in enumerate(loader, start=1):
        assert len(seen) == number
    assert seen == [(2, True, 2), (2, True, 4), (1, True, 5)]


def test_an_update_is_a_value() -> None:
    """What it says stays true, wherever the loader has gone meanwhile."""
    loader = build(Numbers(10), 2, num_replicas=2, replica=1, rounds_per_update=2)
    updates = list(loader.iterate_updates())
    assert [[each.batch.tolist() for each in update] for update in updates] == [
        [[2, 3], [6, 7]],
        [[8]],
    ]
    facts = [(each.is_filler, each.is_last, each.epoch, each.number) for u in updates for each in u]
    assert facts == [(False, False, 0, 1), (False, True, 0, 3), (True, True, 0, 5)]
    assert [each.epoch for update in loader.iterate_updates() for each in update] == [1, 1, 1]


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_a_collate_function_may_fill_the_same_memory_again(kind: type[Any]) -> None:
    """Although an update holds several micro-batches at once."""
    memory = np.zeros(2, dtype=np.int64)

    def collate(rows: list[int]) -> dict[str, torch.Tensor]:
        memory[:] = rows
        return {"input_ids": torch.from_numpy(memory)}

    loader = build(kind(8), collate=collate, rounds_per_update=2)
    found = [each.batch["input_ids"].tolist() for u in loader.iterate_updates() for each in u]
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_datasets_that_fetch_many_rows_at_once() -> None:
    class Many(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            calls.append(list(indices))
            return [10 * index for index in indices]

    calls: list[list[int]] = []
    assert [samples for samples, _, _ in take_epoch(build(Many(3), 2))] == [[0, 10], [20]]
    assert calls == [[0, 1], [2]]


def test_plain_lists_are_data_too() -> None:
    assert [samples for samples, _, _ in take_epoch(build([5, 6, 7], 2))] == [[5, 6], [7]]


def test_empty_data_is_refused() -> None:
    with pytest.raises(DataError, match="the data set is empty"):
        build(Numbers(0))


def test_less_than_one_global_batch_is_refused_when_the_last_is_dropped() -> None:
    with pytest.raises(DataError, match=r"7 samples, less than one global batch of 8.*--keep-last"):
        build(Numbers(7), 2, num_replicas=2, rounds_per_update=2, drop_last=True)


def test_negative_seed_works() -> None:
    """`--seed -1` is accepted by the parser and by torch."""
    assert len(take_epoch(build(Numbers(4), shuffle=True, seed=-1))) == 2


# ---- random numbers --------------------------------------------------------------------------


class Noisy(Numbers):
    """Draws from all three generators, as augmentations do."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), np.random.rand(), random.random()


def collate_noisy(rows: list[Any]) -> torch.Tensor:
    noise = torch.rand(len(rows), 1, dtype=torch.float64)
    return torch.cat([torch.tensor(rows, dtype=torch.float64), noise], dim=1)


def get_states() -> tuple[Any, ...]:
    return (
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),
        random.getstate(),
    )


def take_noise(**options: Any) -> list[list[list[float]]]:
    loader = build(Noisy(11), 2, collate=collate_noisy, shuffle=True, seed=4, **options)
    return [batch.tolist() for _ in range(2) for batch in loader]


def test_draws_depend_on_seed_epoch_and_round_alone() -> None:
    torch.manual_seed(0)
    first = take_noise()
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    assert take_noise() == first
    flat = [row[1] for batch in first for row in batch]
    assert len(set(flat)) == len(flat), "every row draws numbers of its own"


def test_draws_are_the_same_for_any_number_of_processes() -> None:
    """A mask drawn in a collate function must not depend on who draws it."""
    alone = [batch for batch in take_noise() if len(batch) == 2]
    shares = [take_noise(num_replicas=2, replica=replica) for replica in (0, 1)]
    together = [batch for rounds in zip(*shares, strict=True) for batch in rounds]
    assert [batch for batch in together if len(batch) == 2] == alone


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*")
def test_workers_give_the_same_batches() -> None:
    assert take_noise(num_workers=2) == take_noise()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_models_random_numbers_are_untouched(num_workers: int) -> None:
    before = get_states()
    loader = build(Noisy(5), 2, collate=collate_noisy, shuffle=True, num_workers=num_workers)
    for _ in loader:
        assert get_states() == before
    assert get_states() == before


def test_draws_are_the_same_after_a_resume() -> None:
    whole = build(Noisy(11), 2, collate=collate_noisy, shuffle=True)
    batches = [batch.tolist() for batch in whole]
    resumed = build(Noisy(11), 2, collate=collate_noisy, shuffle=True)
    resumed.load_state_dict({"epoch": 0, "consumed_samples": 4})
    assert [batch.tolist() for batch in resumed] == batches[2:]


def test_an_error_in_the_data_leaves_the_random_numbers_alone() -> None:
    def fail(rows: list[Any]) -> Any:
        torch.rand(3)
        raise ValueError("broken row")

    before = get_states()
    with pytest.raises(ValueError, match="broken row"):
        take_epoch(build(Numbers(4), collate=fail))
    assert get_states() == before


def test_the_loader_speaks_the_protocol_of_stateful_loaders() -> None:
    """``state_dict`` within a pass, ``load_state_dict`` before the next: as torchdata's does."""
    loader = build(Numbers(8), shuffle=True)
    assert isinstance(loader, Stateful)
    batches = iter(loader)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [batch.tolist() for batch in batches]
    resumed = build(Numbers(8), shuffle=True)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == rest


# ---- streams -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 30),
    micro=st.integers(1, 3),
    replicas=st.integers(1, 3),
    per_update=st.integers(1, 3),
)
def test_streams_are_cut_as_data_sets_are(
    count: int, micro: int, replicas: int, per_update: int
) -> None:
    for replica in range(replicas):
        options = {
            "num_replicas": replicas, "replica": replica, "rounds_per_update": per_update,
        }  # fmt: skip
        stream = build(Stream(count), micro, **options)
        assert stream.is_stream
        assert take_epoch(stream) == take_epoch(build(Numbers(count), micro, **options))


def test_a_stream_has_no_length() -> None:
    with pytest.raises(TypeError, match="--train-iters"):
        len(build(Stream(4)))


def test_stream_resumes_in_the_middle() -> None:
    whole = take_epoch(build(Stream(9), 2))
    resumed = build(Stream(9), 2)
    resumed.load_state_dict({"epoch": 3, "consumed_samples": 4})
    assert take_epoch(resumed) == whole[2:]
    assert resumed.epoch == 4
    assert take_epoch(resumed) == whole


def test_stream_resumed_at_its_end_continues_with_the_next_epoch() -> None:
    """As data sets do. An empty pass makes the training loop say that the stream is empty."""
    loader = build(Stream(8), 2)
    for _ in loader:
        state = loader.state_dict()
    resumed = build(Stream(8), 2)
    resumed.load_state_dict(state)
    assert take_epoch(resumed) == take_epoch(build(Stream(8), 2))


def test_stream_leaves_the_models_random_numbers_alone() -> None:
    before = get_states()
    loader = build(Stream(4), 2, collate=lambda rows: torch.rand(len(rows)))
    for _ in loader:
        assert get_states() == before


def test_random_draws_of_a_stream_are_the_same_after_a_resume() -> None:
    def draw(rows: list[int]) -> torch.Tensor:
        return torch.rand(len(rows))

    torch.manual_seed(0)
    whole = [batch.tolist() for batch in build(Stream(8), 2, collate=draw)]
    torch.manual_seed(1)
    resumed = build(Stream(8), 2, collate=draw)
    resumed.load_state_dict({"epoch": 0, "consumed_samples": 4})
    assert [batch.tolist() for batch in resumed] == whole[2:]


def test_stream_drops_the_last_smaller_batch_when_asked() -> None:
    """`--no-keep-last` must mean the same for a stream as for a data set."""
    options = {"num_replicas": 2, "rounds_per_update": 2, "drop_last": True}
    expected = take_epoch(build(Numbers(21), 2, **options))
    assert take_epoch(build(Stream(21), 2, **options)) == expected


def test_small_batches_travel_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"ids": torch.arange(6).view(2, 3), "mask": torch.ones(2, 3).bool(), "name": "a"}
    assert fetching.pack(small) is small, "nothing to send in the main process"
    monkeypatch.setattr(fetching, "get_worker_info", object)
    sent = pickle.loads(pickle.dumps(fetching.pack(small))).unpack()
    assert list(sent) == list(small)
    assert torch.equal(sent["ids"], small["ids"])
    assert torch.equal(sent["mask"], small["mask"])
    others = [
        {"x": torch.ones(2, dtype=torch.bfloat16)},
        {"x": torch.ones(2).to(torch.float8_e4m3fn)},
        {"x": torch.ones(2, dtype=torch.complex64).conj()},
        {"x": torch.ones(2, device="meta")},
        {"x": [torch.ones(2)]},
        {"x": torch.ones(2**18)},
        (torch.ones(2),),
    ]
    for batch in others:
        assert fetching.pack(batch) is batch


def test_batches_stay_on_the_host_while_asked() -> None:
    """Those of a CUDA graph are copied straight to its inputs."""
    answers = iter([True, False])
    loader = build(Numbers(4), device=torch.device("meta"))
    updates = loader.iterate_updates(lambda: next(answers))
    found = [(each[0].batch.device.type, each[0].is_on_host) for each in updates]
    assert found == [("cpu", True), ("meta", False)]
