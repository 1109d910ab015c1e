"""Interfaces of policies, predicted rates, and methods that several policies share."""
