"""From a model to a `Traced`."""
