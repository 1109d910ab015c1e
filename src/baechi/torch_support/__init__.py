"""Helpers around torch that costs and the runtime share."""
