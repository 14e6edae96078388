"""An experiment is a folder of ordinary runs: variants (a recipe and a label) x seeds.

jobs      runs them, each in a process of its own
fairness  what variants have to share, before the runs and after
outcome   a finished run, whose files are whole
"""
