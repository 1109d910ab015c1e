"""Costs of operators: measured, or computed from shapes."""
