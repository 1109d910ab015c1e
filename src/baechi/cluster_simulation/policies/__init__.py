"""Scheduling policies: which jobs hold devices."""
