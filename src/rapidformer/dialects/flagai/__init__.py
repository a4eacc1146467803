"""FlagAI's ``Trainer``."""
