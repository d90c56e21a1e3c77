"""Arrivals simulated by counts: the steps of `xsimulator.events` at a fraction of their cost, compiled."""
