"""What a cluster scheduler asks of Baechi, without torch: what is left, what fits there, when."""
