"""Objectives: the figures that a plan may maximise.

Each objective ranks candidates in closed form and verifies the best ones by simulation.
"""
