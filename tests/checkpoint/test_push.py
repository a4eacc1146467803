"""``rapidformer export --push``: the model card, and one commit, to a Hub on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import close_session
from transformers import GenerationConfig, LlamaForCausalLM

import rapidformer
from rapidformer.checkpoint.exporting.push import Hub, push_folder
from rapidformer.checkpoint.exporting.serving import check_serving
from rapidformer.errors import CheckpointError, ConfigurationError
from tests.small import make_model_folder

from .test_gguf import LLAMA_3, make_byte_level, make_model

URL = f"https://huggingface.co/org/name/commit/{'c' * 40}"


class FakeHub(BaseHTTPRequestHandler):
    """The part of the Hub's protocol that one small commit needs."""

    repositories: dict[str, dict[str, Any]] = {}  # noqa: RUF012
    commits: list[list[dict[str, Any]]] = []  # noqa: RUF012
    files: dict[str, bytes] = {}  # noqa: RUF012
    damages = False

    def log_message(self, *_: Any) -> None:
        """Not to the terminal."""

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def read_body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""  # in chunks
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def do_GET(self) -> None:
        if self.path == "/api/whoami-v2":
            if self.headers.get("authorization") == "Bearer hf_right":
                self.answer({"name": "me", "type": "user"})
            else:
                self.answer({"error": "Invalid username or password."}, 401)
        elif self.path.startswith("/api/models/") and "/tree/" in self.path:
            self.answer([{"type": "file", "path": path, "oid": "0" * 40, "size": len(content)}
                         for path, content in self.files.items()])  # fmt: skip
        elif self.path.startswith("/api/models/"):
            name = "/".join(self.path.split("/")[3:5])
            if name in self.repositories:
                siblings = [{"rfilename": path} for path in self.files]
                self.answer({"id": name, "siblings": siblings, **self.repositories[name]})
            else:
                self.answer({}, 404, **{"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        body = self.read_body()
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.repositories[name] = {"private": asked.get("visibility") == "private"}
            self.answer({"url": f"https://huggingface.co/{name}"})
        elif self.path == "/api/validate-yaml":  # of the model card
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for file in json.loads(body)["files"]]  # fmt: skip
            self.answer({"files": files})
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            self.commits.append(lines)
            for line in lines:
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.files[line["value"]["path"]] = content + b"x" * self.damages
                elif line["key"] == "deletedFile":
                    del self.files[line["value"]["path"]]
            self.answer({"success": True, "commitOid": "c" * 40, "commitUrl": URL})
        elif "/paths-info/" in self.path:
            self.answer([
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(
                    b"blob %d\0" % len(content) + content).hexdigest()}
                for path, content in self.files.items()
            ])  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeHub]]:
    class Own(FakeHub):
        repositories, commits, files = {}, [], {}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    close_session()  # one that was opened offline stays so
    yield Own
    server.shutdown()
    server.server_close()
    close_session()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What is left of a run: settings, results, and the best model."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\n")
    make_model_folder(tmp_path / "run" / "best")
    (tmp_path / "run" / ".run.json").write_text('{"best_step": 4}')
    (tmp_path / "run" / "arguments.yaml").write_text(
        "task: sequence_classification    # command line\n"
        f"pretrained_model_name_or_path: {tmp_path / 'base'}  # command line\n"
        "data_path: [org/pairs, /data/secret/more.jsonl, ../secret/a.jsonl]   # command line\n"
        "shuffle: false     # command line\nlr: 0.001   # config.yaml\nseed: 1   # default\n"
    )
    lines = [
        {"step": 4, "eval_accuracy": 0.75, "eval_loss": 0.5},
        {"step": 8, "eval_accuracy": 0.5},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "run" / "metrics.jsonl").write_text(text)
    verdict = {"event": "verify", "verdict": "the same training"}
    (tmp_path / "run" / "events.jsonl").write_text(json.dumps(verdict) + "\n")
    return tmp_path / "run"


def test_the_card_says_where_the_model_comes_from(run: Path, tmp_path: Path) -> None:
    rapidformer.export(run, tmp_path / "out", verify=False)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "mit" and card.data.pipeline_tag == "text-classification"
    assert card.data.datasets == ["org/pairs"] and card.data.library_name == "transformers"
    results = {one.metric_type: one.metric_value for one in card.data.eval_results}
    assert results == {"accuracy": 0.75, "loss": 0.5}  # of the best step, not of the last
    assert card.data.eval_results[0].dataset_name == "org/pairs, more.jsonl, a.jsonl"
    assert (
        "rapidformer --task sequence_classification --pretrained-model-name-or-path base "
        "--data-path org/pairs more.jsonl a.jsonl --shuffle=false --lr 0.001\n"
    ) in card.text
    assert "Compared with the trained model: no (--no-verify)" in card.text
    assert "- `rapidformer verify`: the same training" in card.text
    assert "secret" not in card.content and str(tmp_path) not in card.content
    rapidformer.export(run, tmp_path / "out", verify=False, license="apache-2.0")
    assert ModelCard.load(tmp_path / "out" / "README.md").data.license == "apache-2.0"
    with pytest.raises(ConfigurationError, match="--license 'My own' is no name of the Hub's"):
        rapidformer.export(run, tmp_path / "out", license="My own")


def test_one_commit_has_all_files(
    run: Path, hub: type[FakeHub], tmp_path: Path, command: Callable[..., Any]
) -> None:
    hub.files = {"model-00001-of-00002.safetensors": b"old", "notes.md": b"kept"}
    done = command("export", run, "--push", "org/name", "--private", "--no-verify")
    assert done.returncode == 0, done.stderr
    assert f"pushed    5 files in one commit, and read back: {URL}" in done.stderr
    assert hub.repositories == {"org/name": {"private": True}}
    (commit,) = hub.commits
    assert [line["key"] for line in commit].count("file") == 5
    assert set(hub.files) == {
        "README.md", "config.json", "model.safetensors", "notes.md", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert not any(str(tmp_path).encode() in content for content in hub.files.values())
    card = ModelCard(hub.files["README.md"].decode())
    assert card.data.model_name == "org/name"


def test_what_cannot_be_pushed_is_refused_first(
    run: Path, hub: type[FakeHub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def push(name: str, **options: Any) -> None:
        rapidformer.export(run, tmp_path / "out", verify=False, push=name, **options)

    with pytest.raises(ConfigurationError, match="--private needs --push"):
        rapidformer.export(run, tmp_path / "out", private=True)
    with pytest.raises(ConfigurationError, match="--push name: give it as organization/name"):
        push("name")
    with pytest.raises(ConfigurationError, match="--push a/b c: Repo id must use"):
        push("a/b c")
    (tmp_path / "adapter").mkdir()
    config = {"base_model_name_or_path": str(tmp_path / "base")}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="--push --no-merge: the adapter would name"):
        rapidformer.export(tmp_path / "adapter", tmp_path / "out", merge=False, push="org/name")
    hub.repositories["org/public"] = {"private": False}
    with pytest.raises(ConfigurationError, match="the repository exists and is public"):
        push("org/public", private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigurationError, match=r"the Hub does not know you .*hf auth login"):
        push("org/name")
    assert not hub.commits and not (tmp_path / "out").exists()
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    hub.damages = True
    with pytest.raises(CheckpointError, match=r"README\.md, .* on the Hub is not what is in"):
        push("org/name")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("file", ["model.safetensors", "name-Q8_0.gguf"])
def test_only_weights_of_the_same_format_are_replaced(file: str, tmp_path: Path) -> None:
    class Api:
        def create_repo(self, *_: Any, **__: Any) -> None:
            """Nothing to create."""

        def upload_folder(self, *, delete_patterns: list[str] | None, **_: Any) -> None:
            assert (delete_patterns is None) == file.endswith(".gguf")
            raise OSError("no route to host")

    (tmp_path / file).touch()
    with pytest.raises(
        CheckpointError, match=r"failed: no route to host. The export is in .*hf up.* --private`"
    ):
        push_folder(Hub(Api(), "org/name", private=True), tmp_path)


def test_what_servers_need_is_checked(tmp_path: Path) -> None:
    tokenizer = make_byte_level(LLAMA_3, eos_token="<|im_end|>")
    model = make_model("llama")
    model.generation_config = GenerationConfig(eos_token_id=2)
    model.bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(
        settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast")
    )
    found = check_serving(tmp_path)
    assert found and not found.problems and len(found.passed) == 6

    LlamaForCausalLM(model.config).to(torch.float32).save_pretrained(
        tmp_path, max_shard_size="20KB"
    )
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    next(tmp_path.glob("model-00001-of-*.safetensors")).unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["OwnForCausalLM"], "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    GenerationConfig(eos_token_id=[0, 1]).save_pretrained(tmp_path)
    found = check_serving(tmp_path)
    assert found and found.passed == ["chat template"]
    for problem, text in zip(
        found.problems,
        [
            "vLLM may have no code of its own for OwnForCausalLM",
            "the index names model-00001-of-",
            "fp32: vLLM computes in 16 bits unless it is told",
            "it has 280 tokens, the model 100 rows",
            "<|im_end|> (2) is not in eos_token_id of generation_config.json ([0, 1])",
        ],
        strict=True,
    ):
        assert text in problem
    make_model_folder(tmp_path / "bert")
    assert check_serving(tmp_path / "bert") is None
