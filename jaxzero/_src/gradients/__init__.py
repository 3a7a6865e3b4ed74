"""`value_and_grad` and `forward`: batches, micro-batches, and what leaves a loss."""
