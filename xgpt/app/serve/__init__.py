"""A plan on this machine: what it lacks here, its engine, its endpoint."""
