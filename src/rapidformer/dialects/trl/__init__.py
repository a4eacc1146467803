"""TRL's trainers: ``from rapidformer.dialects.trl import DPOTrainer, DPOConfig``."""

from rapidformer.dialects.trl.configs import (
    CPOConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ORPOConfig,
    RewardConfig,
)
from rapidformer.dialects.trl.trainers import (
    CPOTrainer,
    DPOTrainer,
    GRPOTrainer,
    KTOTrainer,
    ORPOTrainer,
    RewardTrainer,
)

__all__ = [
    "CPOConfig", "CPOTrainer", "DPOConfig", "DPOTrainer", "GRPOConfig", "GRPOTrainer", "KTOConfig",
    "KTOTrainer", "ORPOConfig", "ORPOTrainer", "RewardConfig", "RewardTrainer",
]  # fmt: skip
