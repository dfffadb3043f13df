"""Digests of all that shapes a result: options, the user's code and its values, files."""
