"""Malformed inputs: strategies that draw them, a corpus, and a process for each that tries them.

`python -m tests.benchmarks.bad_inputs` prints a table of all kinds.
"""
