"""``rapidformer export``: a checkpoint of any layout as a folder that plain transformers loads."""
