"""The fair twin: two recipes, paired seeds, separate processes, and a verdict with its interval."""
