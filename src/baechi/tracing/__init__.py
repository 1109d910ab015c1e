"""Tracing of a model to a `Traced`."""
