"""The trackers that ``--report-to`` may name, and the package that each needs. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from rapidformer.config.sections import LoggingArguments
from rapidformer.nearest import suggest

TRACKERS = {
    "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio",
    "azure_ml": "azureml", "clearml": "clearml", "codecarbon": "codecarbon", "comet_ml": "comet_ml",
    "dagshub": "dagshub", "dvclive": "dvclive", "flyte": "flytekit", "kubeflow": "kubeflow",
    "neptune": "neptune", "swanlab": "swanlab",
}  # fmt: skip
_EXTRAS = {"tensorboard": "tensorboard", "wandb": "trackers", "mlflow": "trackers"}
_EXTRAS["trackio"] = "trackers"


def list_named(names: list[str] | None) -> list[str]:
    """The trackers that are meant, each once; without a name, TensorBoard."""
    if names is None:
        return ["tensorboard"]
    if "all" in names:
        names = [*names, *(name for name in TRACKERS if is_installed(name))]
    return [name for name in dict.fromkeys(names) if name not in ("all", "none")]


def is_installed(name: str) -> bool:
    """Whether the tracker's package is there; a folder of the same name is none."""
    spec = find_spec(TRACKERS[name])
    return spec is not None and (spec.origin is not None or name == "azure_ml")


def find_tracker_problems(args: LoggingArguments) -> Iterator[str]:
    """Names that nobody knows, and packages that are not installed."""
    for name in list_named(args.report_to):
        if name in TRACKERS:
            if args.report_to is not None and not is_installed(name):
                extra = _EXTRAS.get(name)
                what = f"'rapidformer[{extra}]'" if extra else TRACKERS[name]
                yield f"--report-to {name} needs a package that is missing: pip install {what}."
        elif not all(name.partition(":")):
            hint = suggest(name, TRACKERS)
            yield (
                f"--report-to {name}: there is {', '.join(TRACKERS)}, all and none, and a class of "
                f"your own as module:Class.{hint}"
            )
