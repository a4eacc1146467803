"""Scripts that import from Megatron, on a machine without it."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from rapidformer.cli.megatron_names import provide_megatron_names


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


def test_plain_python_needs_no_launcher_of_ours() -> None:
    code = "import rapidformer; from megatron import mpu; assert mpu is rapidformer.mpu"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_preprocess_data_is_a_module() -> None:
    words = [sys.executable, "-m", "rapidformer.preprocess_data", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--output-prefix" in done.stdout
