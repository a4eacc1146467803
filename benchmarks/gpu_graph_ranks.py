"""What data parallelism and ZeRO add to a replayed step: a process group of one rank, with NCCL.

    python benchmarks/gpu_graph_ranks.py [--workloads bert-16 gpt2] [--runs alone ...] [--steps 200]

The group has one rank, so nothing travels: this shows the cost of agreeing on sizes, of filling
buckets, of launching collectives and of the second graph; with ZeRO, of gathering weights and
scattering gradients. What the exchange itself takes follows from the bytes and the link
(docs/speed.md).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from workloads import Workload, list_workloads

from rapidformer import Finetuner, RapidformerEngine
from rapidformer.accel.data_parallel import GradientReducer
from rapidformer.accel.sharding import zero
from rapidformer.accel.sharding.zero import ShardedGradients
from rapidformer.config.row import Switch
from rapidformer.dist.topology import Topology, build_lone_mesh
from rapidformer.engine.replay import build_graphs
from rapidformer.training.callbacks import Callback

WARM_UP = 60
ZERO_1, ZERO_3 = ({f"zero_{stage}_memory_optimization": True} for stage in (1, 3))
RUNS: dict[str, dict[str, Any]] = {
    "alone": {},
    "alone, no graphs": {"cuda_graph": "off"},
    "in a group": {"group": True},
    "in a group, no graphs": {"group": True, "cuda_graph": "off"},
    "ZeRO-1": {"group": True, **ZERO_1},
    "ZeRO-1, no graphs": {"group": True, "cuda_graph": "off", **ZERO_1},
    "ZeRO-3": {"group": True, **ZERO_3},
    "ZeRO-3, no graphs": {"group": True, "cuda_graph": "off", **ZERO_3},
}


class Group(Topology):
    """One rank that behaves as if it had others."""

    num_replicas = 2  # type: ignore[assignment]

    def get_replica_mesh(self) -> DeviceMesh | None:
        return self.mesh


class Watch(Callback):
    """Times the steps after the warm-up."""

    steps = 0
    began = 0.0

    def on_step_begin(self, *_: Any) -> None:
        if self.steps == WARM_UP:
            torch.cuda.synchronize()
            self.began = time.perf_counter()
        self.steps += 1

    def get_milliseconds(self) -> float:
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - self.began) / (self.steps - WARM_UP)


class Bench(Finetuner):
    def __init__(self, work: Workload, steps: int, *, group: bool = False, **more: Any) -> None:
        settings = {
            "micro_batch_size": work.batch, "epochs": 1, "lr": 2e-5, "log_interval": 50,
            "dataloader_type": "single", "save": "none", "mixed_precision": "bf16",
        }  # fmt: skip
        super().__init__(RapidformerEngine(args={**settings, **more}))
        self.watch = Watch()
        self.callbacks = [self.watch]
        self._work, self._has_group = work, group
        self._rows = work.make_rows(work.batch * (steps + WARM_UP))

    def train_valid_test_datasets_provider(self) -> Any:
        return self._rows, None, None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        torch.manual_seed(0)
        with torch.device("cuda"):
            return self._work.build(), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss

    def compose(self) -> Any:
        model = super().compose()
        if self._has_group:
            self._join_group(model)
        return model

    def _join_group(self, model: Any) -> None:
        """What the row of data parallelism does, and what else depends on there being ranks."""
        updates, mesh = self.engine.updates, build_lone_mesh("cuda")
        parallelized = self.engine.model.parallelized
        if self.engine.args.zero_stage:
            assert isinstance(parallelized.synchronizer, ShardedGradients)
        else:
            parallelized.synchronizer = GradientReducer(model.parameters(), mesh.get_group())
        group: Any = Group(mesh=mesh)
        updates._runtime.__dict__["topology"] = group
        updates.weights.topology = updates.clock._topology = group
        run = self.engine.model
        updates.graphs = build_graphs(
            parallelized, run.parameters, updates.weights, updates._runtime, run.work
        )


def shard_one_rank(device: str) -> None:
    """Let ZeRO shard over a single rank, where it has no effect otherwise."""
    find_obstacle = Switch.find_obstacle

    def find(self: Switch, *situation: Any) -> Any:
        return None if self.name == "ZeRO" else find_obstacle(self, *situation)

    Switch.find_obstacle = find  # type: ignore[method-assign]
    zero._get_mesh = lambda _: build_lone_mesh(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=["bert-16", "gpt2"])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    shard_one_rank("cuda")
    lines = []
    for name in args.workloads:
        work = list_workloads("full")[name]
        for run in args.runs:
            bench = Bench(work, args.steps, **RUNS[run])
            bench.train()
            graphs = bench.engine.updates.graphs
            count = 0 if graphs is None else graphs.count
            problem = "" if graphs is None else graphs.problem or ""
            took = bench.watch.get_milliseconds()
            lines.append(f"{name:10} {run:24} {took:8.2f} ms/step  {count} graphs {problem}")
            bench.engine.close()
            del bench
            torch.cuda.empty_cache()
    print("\n".join(lines))


if __name__ == "__main__":
    main()
