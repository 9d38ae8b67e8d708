"""Published measurements as data files, one table each with its source, and their simulation. No torch here."""
