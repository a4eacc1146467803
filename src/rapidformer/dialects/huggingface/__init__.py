"""``Trainer`` and ``TrainingArguments`` of Hugging Face's transformers."""
