"""Compare policies, each at its best, with each other and with a given `vllm serve` command."""
