"""A model kind, a source format, a sink format and an engine of somebody else's, as docs/extending.md shows them."""
