"""Whatever is typed or lies in a file: one ConfigurationError, without a traceback or a hang."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rapidformer.config import Settings, get_settings, parse_arguments, resolve
from rapidformer.config.parse import FLAGS_VARIABLE
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.launch.hosts import launch_hosts

_NUMBERS = ["-1e30", "nan", "9" * 5000]
_TEXTS = ["\0", "a" * 5000, "--"]


@pytest.mark.parametrize("number", range(3))
def test_no_value_of_any_flag_is_a_crash(number: int) -> None:
    """Each setting gets one value a round."""
    for place, setting in enumerate(get_settings().values()):
        values = _TEXTS if setting.kind is str else _NUMBERS
        value = values[(place + number) % 3]
        if number and setting.kind is bool:
            continue
        try:
            resolve(parse_arguments([f"{setting.flag}={value}"]))
        except RapidformerError:
            pass
        except Exception as error:
            raise AssertionError(f"{setting.flag}={value[:20]}") from error


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join(['*' + before] * 10)}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"lr: 1\xff", "cannot be read: it is not UTF-8 text"),
        (b"lr: 'a", "is not valid YAML"),
        (b"[" * 1000, "is not valid YAML"),
        (b"seed: " + b"9" * 5000, "is not valid YAML"),
        (BOMB.encode() + b"data_path: *i\n", "must contain `name: value` lines"),
        (b"lr: \0", "is not valid YAML"),
        (b"- 1", "must contain `name: value` lines"),
    ],
    ids=["encoding", "quote", "brackets", "digits", "bomb", "zero", "list"],
)
def test_a_yaml_file_of_any_content(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        parse_arguments(["--config", str(tmp_path / "c.yaml")])


def test_files_that_are_not_regular_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in [
        (tmp_path / "pipe", "it is not a regular file"),
        (Path("/dev/zero"), "it is not a regular file"),
        (tmp_path, "it is a folder"),
        (tmp_path / "none", "No such file or directory"),
    ]:
        with pytest.raises(ConfigurationError, match=f"--config {path} cannot be read: {reason}"):
            parse_arguments(["--config", str(path)])
        with pytest.raises(ConfigurationError, match=f"--hostfile {path} cannot be read: {reason}"):
            launch_hosts([], Settings(hostfile=str(path)))
        with pytest.raises(ConfigurationError, match=f"--deepspeed {path} cannot be read: "):
            resolve(parse_arguments(["--deepspeed", str(path)]))


def test_a_config_from_the_shells_own_pipe_is_read(tmp_path: Path) -> None:
    """``--config <(command)``."""
    reader, writer = os.pipe()
    os.write(writer, b"seed: 7\n")
    os.close(writer)
    assert parse_arguments(["--config", f"/dev/fd/{reader}"]).seed == 7
    os.close(reader)


def test_unbalanced_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigurationError, match="cannot be split into words: no closing quotation"
    ):
        parse_arguments(["--user-defined-parameters", "a='b"])
    monkeypatch.setenv(FLAGS_VARIABLE, "--lr '1")
    with pytest.raises(ConfigurationError, match=f"{FLAGS_VARIABLE} cannot be split into words"):
        parse_arguments([])


def test_home_is_expanded_in_yaml_as_in_a_shell(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("save: ~/runs\ndata_path: [~/a, '~/b']\nload:\n")
    args = parse_arguments(["--config", str(tmp_path / "c.yaml"), "--log-dir=~/logs"])
    home = Path.home()
    assert args.save == str(home / "runs")
    assert args.data_path == [str(home / "a"), str(home / "b")]
    assert args.log_dir == str(home / "logs")
    assert parse_arguments(["--source-prefix", "~ "]).source_prefix == "~ "


def test_a_whole_number_too_large_for_a_fraction(tmp_path: Path) -> None:
    """YAML has whole numbers of any size; turning this one into a float was a traceback."""
    (tmp_path / "c.yaml").write_text("lr: 1" + "0" * 400)
    with pytest.raises(ConfigurationError, match=r"lr.* needs a number that fits into 64 bits"):
        parse_arguments(["--config", str(tmp_path / "c.yaml")])
