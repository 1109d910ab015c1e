"""What runs a placement: segments, streams, executors and the placed module."""
