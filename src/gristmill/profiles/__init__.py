"""Profiles: what the columns of some rows are like, as values that merge; and how far two of them are apart."""
