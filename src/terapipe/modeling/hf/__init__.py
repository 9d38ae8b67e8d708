"""Hugging Face causal LMs as pipeline stages. ``terapipe.hf`` is the public face."""
