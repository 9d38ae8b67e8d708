"""Training runs: data, optimizer, checkpoints, logging, the loop."""

from terapipe.training.checkpoint_folder import folder_of, path_of, steps
from terapipe.training.logging.metrics import read as read_metrics
from terapipe.training.run import Run, run_rank

__all__ = ["Run", "folder_of", "path_of", "read_metrics", "run_rank", "steps"]
