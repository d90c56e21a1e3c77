"""A plan in words and pictures."""
