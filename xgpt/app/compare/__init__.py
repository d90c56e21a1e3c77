"""Policies at their best, and what runs now, read off its command line."""
