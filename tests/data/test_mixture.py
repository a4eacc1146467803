"""Mixtures: which set a sample is from, and which row, by its number alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rapidformer.config import Settings
from rapidformer.data.loader import DistributedLoader
from rapidformer.data.mixture import JoinedRows, Sets, choose_sets, count_sets
from rapidformer.data.named_sets import load_set, read_sets
from rapidformer.data.rounds import MixedOrder
from rapidformer.data.update import MicroBatch
from rapidformer.errors import ConfigurationError, DataError
from tests.data.rig import as_lines, write

SIZES = (23, 9, 40)


def make_rows(
    sizes: tuple[int, ...] = SIZES,
    weights: tuple[float, ...] | None = (3, 1, 2),
    stopping: str = "first",
) -> JoinedRows:
    names = tuple("abc"[: len(sizes)])
    parts = [[1000 * s + row for row in range(size)] for s, size in enumerate(sizes)]
    return JoinedRows(parts, Sets(names, sizes, weights, stopping))


def build(rows: JoinedRows, **options: Any) -> DistributedLoader:
    order = None if rows.sets.weights is None else MixedOrder(rows.sets, is_shuffled=True)
    return DistributedLoader(
        rows, collate=torch.tensor, micro_batch_size=2, shuffle=True, seed=7, order=order,
        num_samples=rows.sets.num_samples, tells_sets=True, **options,
    )  # fmt: skip


def test_choose_sets_depends_on_the_number_alone() -> None:
    whole = choose_sets([0.7, 0.3], 5, 0, 5000)
    assert np.array_equal(choose_sets([7, 3], 5, 1777, 2000), whole[1777:3777])
    assert not np.array_equal(choose_sets([0.7, 0.3], 6, 0, 5000), whole)
    # The shares are exact in every block, and far away too.
    assert abs(int((whole[1024:2048] == 1).sum()) - 0.3 * 1024) < 1
    assert abs((choose_sets([0.7, 0.3], 5, 10**12, 10240) == 1).mean() - 0.3) < 1e-3


def test_samples_of_sets_are_counted_over_periods() -> None:
    count = 2**20 + 1500
    chosen = choose_sets([0.7, 0.3], 5, 0, count)
    assert count_sets([0.7, 0.3], 5, count) == np.bincount(chosen).tolist()


@pytest.mark.parametrize("stopping", ["first", "all"])
@pytest.mark.parametrize("sizes", [(2, 5), (5, 2), (4, 3, 6), (3, 3)])
def test_equal_weights_are_the_round_robin_of_interleave_datasets(
    sizes: tuple[int, ...], stopping: str
) -> None:
    import datasets

    parts = [datasets.Dataset.from_dict({"x": [10 * s + n for n in range(size)]})
             for s, size in enumerate(sizes)]  # fmt: skip
    theirs = datasets.interleave_datasets(parts, stopping_strategy=f"{stopping}_exhausted")
    sets = Sets(tuple("abc"[: len(sizes)]), sizes, (1.0,) * len(sizes), stopping)
    rows = JoinedRows([part["x"] for part in parts], sets)
    ours = [rows[int(number)] for number in sets.list_numbers(0, 0, shuffles=False)]
    assert ours == list(theirs["x"])


@pytest.mark.parametrize(("stopping", "strategy"), [("first", min), ("all", max)])
def test_weights_give_the_shares_and_epochs_of_interleave_datasets(
    stopping: str, strategy: Any
) -> None:
    import datasets

    sizes, shares = (400, 900), (0.25, 0.75)
    parts = [datasets.Dataset.from_dict({"x": [s] * size}) for s, size in enumerate(sizes)]
    theirs = datasets.interleave_datasets(
        parts, probabilities=list(shares), seed=0, stopping_strategy=f"{stopping}_exhausted"
    )
    sets = Sets(("a", "b"), sizes, shares, stopping)
    # Theirs are drawn; ours are the expectation, and no row of the deciding set is left out.
    assert sets.num_samples == strategy(400 / 0.25, 900 / 0.75)
    assert sets.counts == (sets.num_samples // 4, 3 * sets.num_samples // 4)
    assert len(theirs) == pytest.approx(sets.num_samples, rel=0.1)
    assert np.mean(theirs["x"]) == pytest.approx(0.75, abs=0.03)


def test_sets_go_through_their_rows_evenly_over_epochs() -> None:
    rows = make_rows()
    assert rows.sets.counts == (23, 8, 15)  # 23 : 7.67 : 15.33
    seen: Counter[int] = Counter()
    for epoch in range(6):
        numbers = rows.sets.list_numbers(1, epoch, shuffles=True)
        assert rows.sets.count_samples(numbers) == [23, 8, 15]
        seen.update(numbers.tolist())
    for number, size in enumerate(SIZES):
        times = [seen[row] for row in rows.sets.get_range(number)]
        assert max(times) - min(times) <= 1 and sum(times) == 6 * rows.sets.counts[number]
        assert len(times) == size


def read(loaders: list[DistributedLoader], rounds: int) -> list[int]:
    """The rows of so many rounds of all ranks, over the ends of epochs."""

    def repeat(loader: DistributedLoader) -> Iterator[MicroBatch]:
        while True:
            yield from loader.iterate_micro_batches()

    iterators = [repeat(loader) for loader in loaders]
    batches = [next(each) for _ in range(rounds) for each in iterators]
    return [int(row) for batch in batches if not batch.is_filler for row in batch.batch]


@pytest.mark.parametrize("weights", [None, (3, 1, 2)])
def test_ranks_workers_and_resume_change_no_row(weights: tuple[float, ...] | None) -> None:
    rows = make_rows(weights=weights)
    whole = read([build(rows)], 100)
    first = [build(rows, num_replicas=2, replica=rank) for rank in range(2)]
    begun = read(first, 30)  # in the second epoch
    workers = (4, 0, 0, 0)
    later = [build(rows, num_replicas=4, replica=r, num_workers=w) for r, w in enumerate(workers)]
    for loader in later:
        loader.load_state_dict(first[0].state_dict())
    rest = read(later, 8)
    assert first[0].epoch > 0 and len(rest) > 45
    assert begun + rest == whole[: len(begun) + len(rest)]


def test_micro_batches_know_their_sets() -> None:
    rows = make_rows()
    loader = build(rows)
    for micro_batch in loader.iterate_micro_batches():
        assert [int(row) // 1000 for row in micro_batch.batch] == list(micro_batch.sets)
    assert loader.describe_sets(2 * 46)[2] == (
        "mixture   c  32.6 % = 30 samples, 0.75 epochs of 40 rows"
    )
    assert loader.describe_sets() == loader.describe_sets(46)
    assert rows.sets.find_row(24) == "b, row 2"
    assert rows.sets.describe([3, 1, 0])[0] == (
        "mixture   a  75.0 % = 3 samples, 0.13 epochs of 23 rows"
    )


def test_an_epoch_that_would_never_end_is_refused() -> None:
    with pytest.raises(DataError, match=r"1,000,000,000 samples, since b is large for its weight"):
        len(MixedOrder(Sets(("a", "b"), (10, 10**6), (0.999, 0.001), "all"), is_shuffled=True))


def test_an_interleaved_data_set_is_an_ordinary_one() -> None:
    import datasets

    parts = [datasets.Dataset.from_dict({"x": list(range(n, n + 5))}) for n in (0, 10)]
    for made in (datasets.interleave_datasets(parts), datasets.concatenate_datasets(parts)):
        loader = DistributedLoader(made, collate=list, micro_batch_size=4)
        assert [row["x"] for batch in loader for row in batch] == list(made["x"])


# ---- what the user names -------------------------------------------------------------------------


def make_args(**values: Any) -> Settings:
    return Settings(**{k: v if isinstance(v, (list, float)) else str(v) for k, v in values.items()})


def test_plain_files_stay_one_data_set(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{n}.jsonl", as_lines([{"text": n}])) for n in "ab"]
    assert read_sets(make_args(data_path=[str(file) for file in files])) == []
    assert read_sets(make_args(data_path=[str(files[0])])) == []
    assert read_sets(make_args(data_path=["org/name"])) == []
    assert [s.label for s in read_sets(make_args(data_path=["org/name:train_sft"]))] == [
        "name_train_sft"
    ]


def test_caps_splits_and_weights(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", as_lines([{"text": str(n)} for n in range(5)]))
    folder = write(tmp_path / "a" / "train.jsonl", as_lines([{"text": "x"}])).parent
    write(folder / "valid.jsonl", as_lines([{"text": "y"}]))
    args = make_args(data_path=[f"{file}#3", str(folder)], data_weights=[2.0, 1.0])
    sets = read_sets(args)
    assert [(s.label, s.cap, s.weight) for s in sets] == [("a", 3, 2.0), ("a_2", None, 1.0)]
    assert load_set(sets[0], 0, args)["train"]["text"][:] == ["0", "1", "2"]
    assert load_set(sets[1], 1, args).keys() == {"train", "validation"}
    chosen = read_sets(make_args(data_path=[f"{folder}:validation"]))
    assert load_set(chosen[0], 0, args)["train"]["text"][:] == ["y"]


def test_a_yaml_list_has_columns_of_its_own_and_paths_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", as_lines([{"body": "x"}]))
    text = "- path: a.jsonl#1\n  columns: {text: body}\n  template: none\n- org/name:test\n"
    args = make_args(data_path=write(tmp_path / "mix.yaml", text))
    first, second = read_sets(args)
    own = first.apply(args)
    assert (own.text_column, own.chat_template, first.cap) == ("body", "none", 1)
    assert own.data_path == str(tmp_path / "a.jsonl")
    assert (second.path, second.split, second.weight) == ("org/name", "test", None)


@pytest.mark.parametrize(
    ("entries", "problems"),
    [
        ("- path: a\n  wieght: 1\n- path: b\n  cap: 0\n",
         ["the key wieght is unknown: .*weight", "set 2: a cap is a number of rows from 1 up"]),
        ("- path: a\n  weight: 1\n- path: b\n- path: c\n  weight: -1\n",
         ["set 2 has no weight", "the weight -1 of a data set must be a number above 0"]),
        ("- {path: a, columns: {txt: b}, split: 3}\n- 5\n",
         ["no column has the role txt: .*text", "split must be text", "set 2: give the path"]),
        ("path: a\n", ["must be a list of data sets"]),
        ("- [\n", ["is not valid YAML"]),
    ],
)  # fmt: skip
def test_all_problems_of_a_yaml_list_at_once(
    tmp_path: Path, entries: str, problems: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as error:
        read_sets(make_args(data_path=write(tmp_path / "mix.yaml", entries)))
    for problem in problems:
        assert error.match(problem)


def test_sets_of_a_stream(tmp_path: Path) -> None:
    paths = [str(write(tmp_path / f"{n}.jsonl", as_lines([{"text": n}]))) for n in "ab"]
    assert read_sets(Settings(data_path=paths, streaming=True)) == []
    sets = read_sets(Settings(data_path=paths, data_weights=[2.0, 1.0], streaming=True))
    assert [(s.label, s.weight) for s in sets] == [("a", 2.0), ("b", 1.0)]
    with pytest.raises(ConfigurationError, match=r"caps \(#1000\) and splits"):
        read_sets(Settings(data_path=[f"{paths[0]}#1", paths[1]], streaming=True))
    listed = write(tmp_path / "mix.yaml", "- a.jsonl\n- b.jsonl\n")
    with pytest.raises(ConfigurationError, match=r"mix\.yaml has no weights"):
        read_sets(Settings(data_path=[str(listed)], streaming=True))


def test_all_problems_of_a_command_at_once() -> None:
    with pytest.raises(ConfigurationError) as error:
        read_sets(
            Settings(
                data_path=["a.jsonl", "b.jsonl#x", "c/d:train"], data_weights=[1.0, float("nan")],
                valid_data=["v.jsonl"], train_data=["t.jsonl"], group_by_length=True,
            )
        )  # fmt: skip
    assert len(error.value.problems) == 7, error.value.problems
