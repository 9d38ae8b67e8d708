"""Checkpoints: what is saved and left out, how it is written in the background, checked and read again."""
