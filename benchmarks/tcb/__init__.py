"""The tables of TCB: rows of every kind beside the flattened batch, run here and simulated on a V100."""
