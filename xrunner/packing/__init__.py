"""Weights packed once for a CPU's products: base.py has the contract, choice.py the layouts to choose from."""
