"""Two published results held against each other: `gristmill compare` and `gm.compare`."""
