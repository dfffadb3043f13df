"""Stores that a published result is delivered to, and looked up in: one file each."""
