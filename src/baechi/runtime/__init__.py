"""Execution of a placement: segments, streams, executors and the placed module."""
