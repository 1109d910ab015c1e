"""A graph and a cluster as arrays; the clock, lower bounds, coarsening, memory over time."""
