"""What text tasks share: tokens, windows, blocks, masking, packing."""
