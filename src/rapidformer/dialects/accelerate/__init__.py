"""``Accelerator`` of Hugging Face's Accelerate."""
