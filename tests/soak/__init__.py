"""Long tests that anyone can run (make soak, fuzz, races, readers): each decides everything from a seed."""
