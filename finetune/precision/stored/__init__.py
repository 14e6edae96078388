"""Weights that are codes in FP8 and nothing else, and the engine that multiplies them."""
