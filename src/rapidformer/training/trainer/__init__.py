"""``Trainer``: the scripts of Hugging Face and FlagAI, on the one training loop."""
