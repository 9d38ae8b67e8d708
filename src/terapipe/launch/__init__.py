"""Starting ranks: the processes of this machine, and the torchrun line, Slurm script or Kubernetes job of a plan."""
