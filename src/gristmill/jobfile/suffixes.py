"""How names of job files end."""

SUFFIXES = (".yaml", ".yml", ".json")
