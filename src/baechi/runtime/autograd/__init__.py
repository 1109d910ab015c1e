"""Segments as code, and the way of every gradient."""
