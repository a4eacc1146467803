"""What layers without attention do along the tokens (Mamba-2, Qwen3.5), as products of chunks."""
