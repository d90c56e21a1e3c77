"""Run an autoscaler."""
