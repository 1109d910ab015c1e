"""Cluster managers: what they say is free, as devices to solve on, and what they take for a job.

Files go in and out as these write them: JSON of Kubernetes, text of Slurm and of `nvidia-smi`. The
extender and the operator ask Kubernetes' API server; nothing else here talks to one. No torch.
"""
