"""The words of a plan: what is measured once on a model, and what is predicted for a run.

``measure(settings, train)`` gives a ``Shape``; ``predict(shape, settings, world_size)`` gives a
``Prediction`` for the rank that needs the most. Another batch size, length or layout needs no new
measurement. All sizes are bytes, all work is floating-point operations. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

Axis = Literal["data", "tensor", "pipeline", "context", "expert"]
Verdict = Literal["fits", "tight", "does not fit"]
SPARE = 0.05
"""The part of a device's memory that is left free if a run fits for sure."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A quantity of one micro-batch: constant, per token, and per pair of tokens of a row."""

    constant: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0

    def at(self, rows: float, length: float) -> float:
        """Its value for rows of this length."""
        return self.constant + self.per_token * rows * length + self.per_pair * rows * length**2

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            constant=self.constant + other.constant,
            per_token=self.per_token + other.per_token,
            per_pair=self.per_pair + other.per_pair,
        )


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a model."""

    length: int
    """Of its first dimension, along which it is sharded."""
    size: int
    """Elements."""
    width: int
    """Bytes of an element on the device."""
    is_trained: bool
    split_dim: int | None = None
    """The dimension that tensor parallelism splits."""
    heads: int = 0
    """Key/value heads, if it computes those: they are split only as whole heads."""
    is_expert: bool = False
    """Whether expert parallelism splits its first dimension."""
    is_matrix: bool = False
    """Whether it has two dimensions and is in a block, which is what Muon takes."""
    places: tuple[str, ...] = ("before",)
    """Where it is used if it is in no block: before or after them."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The parameters of one part of a model, each once."""

    parameters: tuple[Parameter, ...] = ()

    @property
    def trained(self) -> int:
        """Elements that are trained."""
        return sum(each.size for each in self.parameters if each.is_trained)

    @property
    def frozen(self) -> int:
        """Elements that are not."""
        return sum(each.size for each in self.parameters if not each.is_trained)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One block, or what stands before and after the blocks, for one micro-batch."""

    weights: Weights = field(default_factory=Weights)
    saved: Cost = field(default_factory=Cost)
    """What the forward pass keeps for the backward pass."""
    saved_split: Cost = field(default_factory=Cost)
    """That of it which tensor parallelism splits."""
    casts: Cost = field(default_factory=Cost)
    """That of it which is copies of weights in 16 bits."""
    saved_selective: Cost = field(default_factory=Cost)
    """What is kept of a block if matrix products and attention alone are kept."""
    saved_compiled: Cost = field(default_factory=Cost)
    """What is kept if the block is compiled."""
    inputs: Cost = field(default_factory=Cost)
    """The block's own inputs: all that is kept if it is recomputed."""
    forward_peak: Cost = field(default_factory=Cost)
    """The most that is alive in the forward pass beside what was there before."""
    backward_peak: Cost = field(default_factory=Cost)
    """The same of the backward pass, without the gradients of weights."""
    matrix_flops: Cost = field(default_factory=Cost)
    """Of matrix products, forward and backward without recomputation."""
    attention_flops: Cost = field(default_factory=Cost)
    forward_share: float = 1 / 3
    """The forward pass's part of both: what recomputation repeats."""
    moved: Cost = field(default_factory=Cost)
    """Bytes that everything but matrix products reads and writes, each operation on its own."""
    operations: int = 0
    """Kernels of both passes, each operation on its own."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Equal blocks of one stack."""

    stack: str
    places: tuple[int, ...]
    """Among all blocks, in the order of the forward pass."""
    part: Part
    timed: Timed | None = None
    """If one of them was timed on the device."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.places)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and its batches, measured once in the run's precision."""

    model: str
    rows: int
    """Of a micro-batch, as the model gets them."""
    micro_batch_size: int
    """Samples of the data in it: a pair of texts is one sample, and two rows."""
    length: int
    """Of its rows: the longest that the run is expected to meet."""
    positions: int | None = None
    """Tokens of a row that the model has positions for; None: it says no number."""
    filled: float
    """The fraction of a micro-batch that is not padding."""
    trained_tokens: float
    """The fraction of its positions that have a label."""
    precision: str
    hidden_size: int
    vocabulary: int
    """Words that the loss is computed over; 0 if it is over a few classes."""
    blocks: tuple[Blocks, ...]
    rest: Part
    """Embeddings, head and everything else outside the blocks, without the loss."""
    loss: Part
    """The head's logits and what the loss makes of them."""
    head: int
    """Elements of the head's matrix; 0 without one."""
    lengths: tuple[int, ...] = ()
    """Of rows of the training data."""
    samples: int = 0
    """Rows of the training data; 0 if unknown."""
    optimizer: str = ""
    """The class of a script's own optimizer, if it has one."""
    reference_bytes: int = 0
    """Of frozen models beside the trained one."""

    def count_rows(self, micro_batch_size: int | None) -> float:
        """Rows of a micro-batch of this many samples."""
        return self.rows / self.micro_batch_size * (micro_batch_size or 1)

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        every = [(group.count, group.part) for group in self.blocks] + [(1, self.rest)]
        return sum(n * (part.weights.trained + part.weights.frozen) for n, part in every)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak memory of one rank, by part."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    loss: int = 0
    gathers: int = 0
    """Whole weights and gradients of blocks that are sharded otherwise."""
    buffers: int = 0
    """Temporary results inside an operation or a block."""
    overhead: int = 0
    """Of context, libraries and communicators: outside what the framework counts."""
    fragments: int = 0
    """What the allocator holds and cannot use: pieces that are too small for what is asked for."""
    host: int = 0
    """In host memory, which is no part of the total."""

    @property
    def total(self) -> int:
        """On the device."""
        return sum(self.by_part().values())

    @property
    def least(self) -> int:
        """On the device if the allocator lost nothing."""
        return self.total - self.fragments

    @property
    def allocated(self) -> int:
        """What the framework counts as allocated."""
        return self.least - self.overhead

    def judge(self, available: float) -> Verdict:
        """Whether it fits a device with so many bytes: for sure, or if little is lost."""
        if self.total <= available * (1 - SPARE):
            return "fits"
        return "tight" if self.least <= available else "does not fit"

    def by_part(self) -> dict[str, int]:
        """Every part of the total by its name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "host"}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Exchanges of one kind over one axis of the mesh, of one rank."""

    axis: Axis
    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    size: float
    """Bytes of the whole tensors of all calls together."""
    calls: int
    ranks: int
    per: Literal["micro_batch", "update"] = "micro_batch"
    is_hidden: bool = False
    """Whether it runs beside the computation."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Kernels of one micro-batch, forward and backward."""

    matrix_flops: float = 0.0
    low_flops: float = 0.0
    """Those of them that run in 8 bits."""
    attention_flops: float = 0.0
    moved: float = 0.0
    """Bytes that everything else reads and writes."""
    operations: int = 0


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What a block took on the GPU at hand, and the work that it was."""

    seconds: float
    load: Load


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one rank computes and moves in a micro-batch, and in an update."""

    blocks: Load
    """What they recompute included."""
    rest: Load
    """Of everything before and after them."""
    update_bytes: float
    """Bytes that clipping and optimizer read and write in an update."""
    host_bytes: float
    """Bytes between host and device in a micro-batch."""
    host_update_bytes: float
    """The same in an update."""
    collectives: tuple[Collective, ...]
    micro_batches: int
    """Of an update, on each rank."""
    stages: int
    """Of the pipeline."""
    tokens: float
    """Of an update over all ranks, without padding."""
    samples: int
    """Of an update over all ranks."""
    is_captured: bool = False
    """Whether its passes are replayed as CUDA graphs."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The rank that needs the most memory, and its work."""

    memory: Memory
    work: Work
