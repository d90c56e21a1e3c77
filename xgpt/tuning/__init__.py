"""Close the loop on a running engine: check its predictions, tune its settings by measurements, and watch it."""
