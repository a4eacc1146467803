from __future__ import annotations

import subprocess
import sys

import pytest

from rapidformer.errors import ConfigurationError
from rapidformer.tasks.registry import get_task, list_tasks
from rapidformer.tasks.rows.rows import list_own_code


def test_names_and_aliases() -> None:
    assert get_task("casual_lm") is get_task("causal_lm")
    assert get_task("Token-Classification").name == "token_classification"
    names = [name for task in list_tasks() for name in (task.name, *task.aliases)]
    assert len(names) == len(set(names))
    for task in list_tasks():
        assert task.description and task.columns and task.auto_class.startswith("AutoModel")


def test_required_columns() -> None:
    needed = {role.name: role.required for role in get_task("reward").columns}
    assert needed["rejected"] and not needed["chosen"] and not needed["prompt"]


def test_unknown_task_gets_a_hint() -> None:
    message = r"--task sequence_clasification .*Did you mean sequence_classification\?"
    with pytest.raises(ConfigurationError, match=message):
        get_task("sequence_clasification")


def test_the_list_needs_no_torch() -> None:
    code = (
        "import sys; from rapidformer.tasks.registry import list_tasks; list_tasks();"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'torchmetrics'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_prepared_rows_are_cached_by_the_code_of_all_tasks() -> None:
    """Features that were cached before a change of any file here must not be used after it."""
    names = {path.name for path in list_own_code()}
    assert {"rows.py", "features.py", "windows.py", "causal_lm.py", "base.py"} <= names
