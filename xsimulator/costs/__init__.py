"""Compute from a profile the times of steps on the stages of a lane."""
