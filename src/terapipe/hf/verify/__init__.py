"""Whether a Hugging Face model is exact in stages and slices, tried on small copies."""
