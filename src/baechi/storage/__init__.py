"""Values as versioned JSON."""
