"""Scripts that import from Megatron, on a machine without it."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rapidformer.dialects.megatron import provide_megatron_names
from tests.processes import PATIENCE, find_free_port


def _list_aliases() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "megatron"]


@pytest.fixture
def without_megatron() -> Iterator[None]:
    before = {name: sys.modules.pop(name) for name in _list_aliases()}
    yield
    for name in _list_aliases():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.usefixtures("without_megatron")
def test_names_of_megatron_are_ours() -> None:
    provide_megatron_names()
    namespace: dict[str, object] = {}
    exec(
        "from megatron import mpu, get_args, get_timers, get_tokenizer\n"
        "from megatron.core import mpu as core_mpu, tensor_parallel\n"
        "from megatron.mpu import broadcast_data\n"
        "from megatron.utils import get_ltor_masks_and_position_ids\n"
        "from megatron.data.gpt_dataset import build_train_valid_test_datasets\n"
        "from megatron.model import GPTModel\n"
        "import megatron.core.mpu\n",
        namespace,
    )
    import rapidformer

    assert namespace["mpu"] is namespace["core_mpu"] is rapidformer.mpu
    assert namespace["get_args"] is rapidformer.get_args
    assert namespace["get_tokenizer"] is rapidformer.get_tokenizer
    assert namespace["broadcast_data"] is rapidformer.mpu.broadcast_data
    assert namespace["GPTModel"] is rapidformer.GPTModel
    assert importlib.util.find_spec("megatron") is not None, "asked by libraries, with a reason"


@pytest.mark.usefixtures("without_megatron")
def test_other_names_say_what_there_is() -> None:
    provide_megatron_names()
    megatron = importlib.import_module("megatron")
    with pytest.raises(AttributeError, match=r"has only mpu, get_args.*, not init"):
        _ = megatron.initialize_megatron
    with pytest.raises(ImportError, match="initialize_megatron"):
        exec("from megatron import initialize_megatron")
    with pytest.raises(ModuleNotFoundError, match=r"megatron\.training"):
        importlib.import_module("megatron.training")


@pytest.mark.usefixtures("without_megatron")
def test_megatron_itself_is_left_alone() -> None:
    sys.modules["megatron"] = own = ModuleType("megatron")
    provide_megatron_names()
    assert sys.modules["megatron"] is own
    assert not hasattr(own, "mpu")


def test_the_names_do_not_import_torch_when_they_are_looked_at() -> None:
    """``import rapidformer.dialects.megatron, torch`` failed: inspect asks all for ``__file__``."""
    aliases = [sys.modules[name] for name in _list_aliases()]
    assert aliases and not any(hasattr(alias, "__file__") for alias in aliases)


def test_plain_python_needs_no_launcher_of_ours(python: Path) -> None:
    code = (
        "import rapidformer.dialects.megatron; from megatron import mpu; "
        "assert mpu is rapidformer.mpu"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


UNDER_TORCHRUN = """
import torch
import rapidformer.dialects.megatron
from megatron import mpu
from megatron.mpu import get_tensor_model_parallel_rank

rapidformer.RapidformerEngine(args={"tensor_model_parallel_size": 2, "device": "cpu"})
assert mpu is rapidformer.mpu
assert get_tensor_model_parallel_rank is mpu.get_tensor_model_parallel_rank
assert (mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()) == (1, 0)
assert mpu.get_tensor_model_parallel_world_size() == 2
rank = mpu.get_tensor_model_parallel_rank()
total = torch.tensor(float(rank + 1))
torch.distributed.all_reduce(total, group=mpu.get_tensor_model_parallel_group())
rows = {"text": torch.arange(4)} if rank == 0 else None
sent = mpu.broadcast_data(["text"], rows, torch.int64)["text"].tolist()
with open(f"rank{rank}", "w") as file:
    file.write(f"{total.item()} {sent}")
"""


@pytest.mark.slow
def test_torchrun_needs_no_launcher_of_ours(python: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNDER_TORCHRUN)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
             str(find_free_port()), "script.py"]  # fmt: skip
    done = subprocess.run(
        [python, *words], cwd=tmp_path, capture_output=True, text=True, check=False,
        timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["3.0 [0, 1, 2, 3]"] * 2


def test_preprocess_data_is_a_module() -> None:
    words = [sys.executable, "-m", "rapidformer.preprocess_data", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--output-prefix" in done.stdout
