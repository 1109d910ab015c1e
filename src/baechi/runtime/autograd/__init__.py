"""Segments as code, and the path of every gradient."""
