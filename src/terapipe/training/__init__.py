"""Training runs: data, optimizer, checkpoints, logging, the loop. Its names are in its modules: importing ``config``
never loads torch."""
