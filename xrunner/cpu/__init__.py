"""Kernels for CPUs: products with packed weights, and attention over paged blocks."""
