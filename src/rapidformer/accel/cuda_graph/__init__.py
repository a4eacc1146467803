"""One CUDA graph for the forward and backward passes of an update (``--cuda-graph``)."""
