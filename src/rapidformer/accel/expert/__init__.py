"""Expert parallelism: the experts of a mixture distributed over data-parallel ranks."""
