"""Where rows come from: the source contract, finding files, one module per format, row conditions."""
