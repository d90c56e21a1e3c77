"""The tables of TCB: rows of every kind and the flattened batch, run here and simulated on a V100."""
