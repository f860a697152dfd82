"""One module for each process kind, and the wiring that chooses implementations."""
