"""Segments recorded as CUDA graphs and replayed."""
