"""Planning of a call: its costs, its placement, what runs it, and what is faster by measurement."""
