"""Matrix products and small operations of layers, laid out and fused for the processor."""
