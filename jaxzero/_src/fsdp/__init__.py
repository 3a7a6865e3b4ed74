"""Stage 3: observe a loss, schedule its gathers and reductions, evaluate it."""
