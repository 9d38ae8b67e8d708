"""What to cut: slices, plans and the split of layers over stages. No torch here."""
