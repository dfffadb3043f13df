"""Arrow columns: lossless casts, rows by number, conversion from and to Python values, types as text."""
