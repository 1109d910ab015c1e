"""What a cluster scheduler asks, without torch: what is left, where a job fits, and when."""
