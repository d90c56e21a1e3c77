"""Kernels for GPUs, and steps captured in CUDA graphs."""
