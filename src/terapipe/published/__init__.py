"""The TeraPipe paper's experiments on simulated clusters. No torch here."""
