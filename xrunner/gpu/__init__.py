"""GPU kernels, and steps captured in CUDA graphs."""
