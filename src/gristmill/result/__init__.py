"""Reading a result: rows, dead letters, verification."""
