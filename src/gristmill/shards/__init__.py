"""What a plan holds: files, shards, ranges, counts."""
