"""What the ranks of a pipeline send each other, and how they fail together."""
