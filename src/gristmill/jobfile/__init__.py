"""Jobs as files: reading, variables, profiles, merging, writing, the JSON Schema."""
