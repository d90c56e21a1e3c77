"""Weights packed once for the products of a CPU: base.py has the contract, choice.py the layouts to choose from."""
