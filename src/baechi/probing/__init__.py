"""What a machine has: devices, free memory, links."""
