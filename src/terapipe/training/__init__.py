"""Training runs: data, optimizer, checkpoints, logging, the loop."""
