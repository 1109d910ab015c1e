"""One file per placer; each is a frozen value whose fields are its parameters."""
