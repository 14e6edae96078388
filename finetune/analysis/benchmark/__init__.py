"""Speed and memory of recipes, measured: random weights, synthetic tokens, no data and no hub.

benchmark  all points in turn, each in a process of its own: `benchmark(...)`
grid       the points to measure, and the job of a process: a recipe at a point
point      the process that measures one point
result     the rows it ends in, as a table, JSON, CSV and Markdown
"""
