"""Objectives: what a plan maximises. Each ranks candidates in closed form and verifies the best by simulation."""
