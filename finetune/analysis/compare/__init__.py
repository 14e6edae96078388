"""Comparison of two recipes: paired seeds, a process for each run, a verdict with its interval."""
