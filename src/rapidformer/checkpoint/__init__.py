"""Save and load the whole state of a run, and models as Hugging Face folders."""
