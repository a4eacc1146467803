"""What turns gradients into updates: optimizers and the learning rate."""
