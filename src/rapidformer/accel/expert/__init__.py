"""Expert parallelism: the experts of a mixture spread over data-parallel ranks."""
