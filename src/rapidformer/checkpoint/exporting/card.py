"""What an export says of itself: what it is, what it learnt from, and what is known about it."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.exporting.proof import Changes, Proof
from rapidformer.checkpoint.exporting.serving import Serving
from rapidformer.checkpoint.exporting.source import Source
from rapidformer.checkpoint.finding import (
    ARGUMENTS_FILE,
    METRICS_FILE,
    RUN_FILE,
    list_arguments,
    read_arguments,
)
from rapidformer.checkpoint.inventory import read_metrics
from rapidformer.checkpoint.publish import read_json
from rapidformer.config.schema import to_flag
from rapidformer.errors import ConfigurationError, ModelError
from rapidformer.hub import is_hub_name
from rapidformer.log import get_logger
from rapidformer.run_events import read_events

_CARD = "README.md"
_TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForImageClassification": "image-classification",
    "ForCTC": "automatic-speech-recognition",
    "ForImageTextToText": "image-text-to-text",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
    "Model": "feature-extraction",
}
_DATA = ("data_name", "data_path", "data_dir", "train_data", "train_data_path")


def write_card(
    folder: Path, source: Source, report: Report, name: str, license: str | None
) -> None:
    """Write ``README.md``, and read it back as the Hub does."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    places = (source.folder.parent, source.folder)
    run = next((place for place in places if (place / ARGUMENTS_FILE).is_file()), None)
    settings, command = _read_settings(run)
    data = [text for setting in _DATA for text in _list(settings.get(setting))]
    label = ", ".join(map(_hide_path, data)) or "the run's data"
    kind, task = (data[0] if data and is_hub_name(data[0]) else "custom"), _find_task(source)
    results = [
        EvalResult(
            task_type=task or "other",
            dataset_type=kind,
            dataset_name=label,
            dataset_split="validation",
            metric_type=metric,
            metric_value=value,
        )
        for metric, value in _read_results(run, source).items()
    ]
    is_adapter = (folder / "adapter_config.json").is_file()
    known = license or _find_license(source.start)
    if known is None:
        get_logger().info("card      the licence is not known: --license says it")
    facts = ModelCardData(
        base_model=source.start if source.start and is_hub_name(source.start) else None,
        license=known, library_name="peft" if is_adapter else report.format, pipeline_tag=task,
        datasets=[text for text in data if is_hub_name(text)] or None, model_name=name,
        tags=["rapidformer"], eval_results=results or None,
    )  # fmt: skip
    lines = [f"# {name}", ""]
    lines += [f"Trained from {_hide_path(source.start)}.", ""] if source.start else []
    lines += [f"Data: {label}.", ""] if data else []
    lines += _describe_export(report, run)
    if command:
        lines += ["", "## Training", "", "```", command, "```"]
    text = "\n".join(["---", facts.to_yaml(), "---", "", *lines, "", _list_versions(), ""])
    (folder / _CARD).write_text(text, encoding="utf-8")
    try:
        back = ModelCard.load(folder / _CARD)
    except ValueError as reason:
        raise ModelError(f"the model card cannot be read back: {reason}") from None
    if back.data.to_dict() != facts.to_dict():
        raise ModelError("the model card does not read back as it was written.")


def _list_versions() -> str:
    known = []
    for package in ("rapidformer", "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):  # run from its sources
            known.append(f"{package} {version(package)}")
    return f"Versions: {', '.join(known)}."


def check_license(license: str | None) -> None:
    """Refuse what the Hub does not take for a licence's name."""
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise ConfigurationError(
            f"--license {license!r} is no name of the Hub's, such as apache-2.0, mit or other."
        )


def _describe_export(report: Report, run: Path | None) -> list[str]:
    """What was exported, and what is proven about it."""
    lines = ["## Export", "", f"- Format: {report.format}, {report.dtype}"]
    if report.is_merged:
        lines += ["- An adapter, merged into the weights under it"]
    if report.changes is not None:
        changes = report.changes
        lines += [f"- {changes.changed} of {changes.total} tensors differ from the base model's"]
    proof = report.proof.describe() if report.proof else "no (--no-verify)"
    lines += [f"- Compared with the trained model: {proof}"]
    if report.serving is not None:
        lines += [f"- For vLLM and transformers serve: {', '.join(report.serving.passed)} passed"]
        lines += [f"  - problem with the {problem}" for problem in report.serving.problems]
    verdict = _read_verdict(run)
    return [*lines, f"- `rapidformer verify`: {verdict}"] if verdict else lines


def _read_settings(run: Path | None) -> tuple[dict[str, Any], str | None]:
    """A run's settings, and the command with those that somebody gave; a script has none."""
    if run is None:
        return {}, None
    words, settings = ["rapidformer"], read_arguments(run)
    if not settings.get("task") or settings.get("user_script"):
        return settings, None
    for _, name, _, origin in list_arguments(run):
        if name in ("save", "config") or origin.startswith(("default", "derived")):
            continue
        flag, value = to_flag(name), settings.get(name)
        if isinstance(value, bool):
            words += [flag if value else f"{flag}=false"]
        else:
            words += [flag, *map(_hide_path, _list(value))]
    return settings, shlex.join(words)


def _hide_path(text: str) -> str:
    """A folder of this machine is nobody else's business: its name is enough."""
    is_sentence = len(text.split()) > 1 and not Path(text).is_absolute()
    return text if "/" not in text or is_sentence or is_hub_name(text) else Path(text).name


def _list(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [str(one) for one in values if one is not None]


def _read_results(run: Path | None, source: Source) -> dict[str, float]:
    """The evaluation of the very model that is exported."""
    if run is None:
        return {}
    evaluations = read_metrics(run / METRICS_FILE, ()).evaluations
    step = max(evaluations, default=None)
    if source.run is not None:
        step = source.run["step"]
    elif source.folder.name == "best":
        step = read_json(run / RUN_FILE, or_nothing=True).get("best_step", step)
    found = evaluations.get(step, {}) if step is not None else {}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _read_verdict(run: Path | None) -> str | None:
    """What ``rapidformer verify`` last said about the run, if it has left a line."""
    events = list(read_events(run)) if run else []
    verdicts = [event.get("verdict") for event in events if event["event"] == "verify"]
    return verdicts[-1] if verdicts else None


def _find_task(source: Source) -> str | None:
    config = read_json(source.description / "config.json", or_nothing=True)
    name = str(next(iter(config.get("architectures") or ()), ""))
    return next((task for ending, task in _TASKS.items() if name.endswith(ending)), None)


def _find_license(start: str | None) -> str | None:
    """That of the base model, if its card is on this machine."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    if start is None:
        return None
    path: Any = Path(start) / _CARD
    if not path.is_file():
        path = try_to_load_from_cache(start, _CARD) if is_hub_name(start) else None
    if not isinstance(path, (str, Path)):
        return None
    with contextlib.suppress(ValueError, OSError):
        found = ModelCard.load(path, ignore_metadata_errors=True).data.get("license")
        return str(found) if found else None
    return None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was exported, and what is proven about it."""

    source: str
    folder: str
    format: str
    dtype: str
    is_merged: bool
    changes: Changes | None
    """None if the starting model is unknown."""
    proof: Proof | None
    """None if it was not wanted."""
    serving: Serving | None
    """What vLLM and ``transformers serve`` find in it; None if it is not for them."""
