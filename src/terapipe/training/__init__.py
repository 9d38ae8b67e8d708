"""Many steps: data, optimizer, checkpoints, metrics, the loop."""
