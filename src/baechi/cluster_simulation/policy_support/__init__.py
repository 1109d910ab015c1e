"""What policies are made of: their interfaces, predicted rates, and methods that they share."""
