"""Cluster managers: what they say is free, as devices to solve on, and what they take for a job.

Files go in and out as these write them: JSON of Kubernetes, text of Slurm and of `nvidia-smi`.
Nothing here talks to a server, or needs torch.
"""
