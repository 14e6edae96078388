"""Speed and memory of recipes, measured with random weights and synthetic tokens.

benchmark  entry point and runner: every point of every recipe in a process of its own
grid       the points to measure, and the job that a process receives
point      the process that measures one point
result     the rows, as a table, JSON, CSV and Markdown
"""
