"""What is decided before anything runs: frozen values and protocols, no I/O."""
