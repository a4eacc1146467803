"""``accelerator_config``: transformers' arguments always hold one, and scripts set its fields."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass
class AcceleratorOptions:
    """The names and defaults of transformers' ``AcceleratorConfig``."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False


DEFAULTS = dataclasses.asdict(AcceleratorOptions())
ACCUMULATION = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
"""What ``gradient_accumulation_kwargs`` may hold; only the first changes what a run computes."""
READ = ("split_batches", "gradient_accumulation_kwargs")
"""What has an effect here."""
