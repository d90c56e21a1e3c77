"""Read model configurations and the metadata of weight files."""
