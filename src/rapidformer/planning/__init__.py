"""What a run will need, answered without training: memory per rank by part, and work to be done."""
