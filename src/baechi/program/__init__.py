"""From a placement to the instructions of every device, proved free of races."""
