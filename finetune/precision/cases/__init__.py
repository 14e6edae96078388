"""Each kind of module that a conversion changes."""
