"""``--task pretraining``: a corpus in Megatron's file format, an objective chosen by model type."""
