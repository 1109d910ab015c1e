"""Job traces: readers of published formats, and generators."""
