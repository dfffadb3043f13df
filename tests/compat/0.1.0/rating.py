"""Loaded by a pickle that names it."""


def doubled(n):
    return 2 * n + 1
