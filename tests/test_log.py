"""The logger: one short form, on standard error, from the first process."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rapidformer.log import configure_logging, get_logger, warn_once


@pytest.fixture(autouse=True)
def _configured() -> None:
    configure_logging("info")


@pytest.fixture
def as_rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")


def test_form(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger().info("step %d", 3)
    get_logger().warning("careful")
    get_logger("training").error("broken")
    captured = capsys.readouterr()
    assert captured.err == "step 3\nwarning: careful\nerror: broken\n"
    assert captured.out == ""


def test_configuring_again_does_not_double_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    configure_logging("warning")
    get_logger().warning("once")
    get_logger().info("too quiet")
    assert capsys.readouterr().err == "warning: once\n"


def test_names() -> None:
    assert get_logger().name == "rapidformer"
    assert get_logger("rapidformer").name == "rapidformer"
    assert get_logger("mine").name == "rapidformer.mine"
    assert get_logger("rapidformer.mine").name == "rapidformer.mine"
    assert get_logger("mine").parent is logging.getLogger("rapidformer")


@pytest.mark.usefixtures("as_rank_1")
def test_a_script_may_log_on_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("script").info("on %s", "one", main_process_only=True)  # type: ignore[call-arg]
    get_logger("script").info("on %s", "all", main_process_only=False)  # type: ignore[call-arg]
    assert capsys.readouterr().err == "[rank 1] on all\n"


def test_a_script_may_give_a_level_and_warn_once(capsys: pytest.CaptureFixture[str]) -> None:
    logger: Any = get_logger("levelled", log_level="debug")
    logger.debug("detail")
    for _ in range(2):
        logger.warning_once("said %s", "once")
    get_logger("levelled", log_level="INFO").debug("too quiet")
    assert capsys.readouterr().err == "debug: detail\nwarning: said once\n"


@pytest.mark.usefixtures("as_rank_1")
def test_other_processes_say_errors_only_with_their_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    get_logger().info("hello")
    get_logger().error("broken")
    assert capsys.readouterr().err == "[rank 1] error: broken\n"


@pytest.mark.usefixtures("as_rank_1")
def test_warning_of_another_process_is_shown_with_its_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As log.py's own first lines promise: 'the trouble may be theirs alone'."""
    get_logger().warning("careful")
    assert capsys.readouterr().err == "[rank 1] warning: careful\n"


def test_rank_of_a_platform_without_local_rank_is_a_nodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    get_logger().info("hello")
    assert capsys.readouterr().err == "hello\n"


def test_warning_once(capsys: pytest.CaptureFixture[str]) -> None:
    warn_once.cache_clear()
    for _ in range(3):
        warn_once("this has no effect")
    warn_once("nor has that")
    assert capsys.readouterr().err == "warning: this has no effect\nwarning: nor has that\n"


@pytest.mark.usefixtures("as_rank_1")
def test_other_processes_repeat_only_warnings_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warn_once("a setting has no effect")
    warn_once("a weight here has no gradient", is_local=True)
    warn_once("a weight here has no gradient", is_local=True)
    assert capsys.readouterr().err == "[rank 1] warning: a weight here has no gradient\n"
