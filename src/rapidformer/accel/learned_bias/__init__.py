"""Attention of T5 and similar models on a GPU: a kernel that also differentiates the bias."""
