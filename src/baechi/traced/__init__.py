"""A traced model as data, and the operator graph of one of its steps."""
