"""What every operator costs: measured, or computed from shapes."""
