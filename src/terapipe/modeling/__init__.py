"""What to compute: attention over slices and models as stages. torch, but not torch.distributed."""
