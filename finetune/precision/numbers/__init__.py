"""Formats, casts, scaling rules and GEMMs: what FP8 is, of matrices alone."""
