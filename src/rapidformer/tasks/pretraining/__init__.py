"""``--task pretraining``: a corpus in Megatron's files, an objective by the kind of model."""
