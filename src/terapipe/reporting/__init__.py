"""Show it: a Timeline as text, as a picture, as a page. No torch here."""
