"""Frozen values that the stages hand on: graph, cluster, costs, placement, instructions."""
