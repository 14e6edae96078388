"""Speed and memory of recipes, measured with random weights and synthetic tokens.

benchmark  entry point: every point of every recipe, an experiment of ordinary runs each
grid       the points to measure, and a recipe at a point
result     the rows, as a table, JSON and CSV
matrix     one recipe in eight precisions, beside the figures that circulate; `matrix_runs` runs it
"""
