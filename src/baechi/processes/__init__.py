"""Processes that run one program together: transports between them, and what they agree on."""
