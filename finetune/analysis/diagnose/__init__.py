"""Diagnosis of a run: executed precisions, step time, and why FP8 is or is not faster."""
