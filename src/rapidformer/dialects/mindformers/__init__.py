"""MindFormers' ``Trainer``, ``TrainingArguments`` and ``init_context``."""
