"""Training checkpoints, written and read."""
