from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rapidformer import hub


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    hub._opens_connection.cache_clear()
    yield
    hub._opens_connection.cache_clear()


def test_unreachable_hub_is_found_out_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://127.0.0.1:9")
    assert hub.is_hub_reachable() is False


def test_reachable_hub_and_the_variables_that_keep_off_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub.is_hub_reachable() is True
        monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
        assert hub.is_hub_reachable() is True
        assert hub.is_hub_reachable("HF_DATASETS_OFFLINE") is False
        monkeypatch.setenv("HF_HUB_OFFLINE", "yes")
        assert hub.is_hub_reachable() is False


def test_what_looks_like_a_path(tmp_path: Path) -> None:
    paths = ["./x", "/x", "~/x", "a/b/c", "a/", r"a\b"]
    assert [text for text in [*paths, "glue", "owner/name"] if hub.looks_like_path(text)] == paths
    (tmp_path / "bert-base").mkdir()
    assert hub.suggest_path(tmp_path / "bert-bsae") == f" Did you mean {tmp_path / 'bert-base'}?"
    assert hub.suggest_path(tmp_path / "else") == hub.suggest_path(Path("/nowhere/x")) == ""
