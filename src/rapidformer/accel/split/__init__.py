"""What tensor, context and pipeline parallelism share: values that are split over ranks."""
