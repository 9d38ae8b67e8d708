"""What TRL's trainers offer, by the plain class and through a pipeline: the same curves, or a refusal by name."""
