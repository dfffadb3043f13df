"""Where rows come from and where answers go: listing files, one module a format. Reads and writes, decides nothing."""
