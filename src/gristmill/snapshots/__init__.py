"""Sources that are stores, read at one snapshot: databases and lakes."""
