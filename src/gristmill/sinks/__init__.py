"""Where answers go: the sink contract, one module per format, partitions."""
