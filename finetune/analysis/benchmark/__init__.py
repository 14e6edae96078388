"""Speed and memory of recipes, measured: random weights, synthetic tokens, no data and no hub.

grid      which micro-batches and lengths, in which order, and which are not tried any more
job       one point: a recipe, or a step of a ladder, at a micro-batch and a length
point     the process that measures one point
rows      what came of it: `Benchmark`, as a table, JSON, CSV, Markdown
ratios    how many times faster, with an interval
ladders   LoRA and full fine-tuning, step by step from what others ship to what is here
runner    all points in turn, a process each: `benchmark(...)`
"""
