"""Choose: layout, order, cuts and recomputation for a model on a cluster, under a byte budget. No torch here."""
