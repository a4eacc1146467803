"""Context parallelism: each rank holds a slice of every sequence; start with ``parallel``."""
