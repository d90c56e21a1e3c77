"""Describe a plan as text on the terminal and as a page."""
