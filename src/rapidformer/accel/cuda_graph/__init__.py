"""``--cuda-graph``: replay the passes of an optimizer step as one CUDA graph."""
