"""The local page on which one plans."""
