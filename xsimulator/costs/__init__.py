"""Compute from a profile how long a step takes on the stages of a lane."""
