"""Probes of this machine: devices, free memory, links."""
