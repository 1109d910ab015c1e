"""A trace-driven simulation of a shared cluster."""
