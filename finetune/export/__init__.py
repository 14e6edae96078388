"""A run's weights in a form that others load: adapter, merged, or quantised for serving.

runs.py         what a run folder holds, and whether it can be exported
checkpoint.py   the stored weights it started from, shard by shard, and their names in the model
merging.py      one weight with its adapter merged in
layouts.py      FP8 and NVFP4 as compressed-tensors publishes them
calibration.py  the largest inputs of each layer, for NVFP4
writing.py      shards, configuration, tokenizer
destination.py  complete and checked, or not there
evaluation.py   the run's own rows, and its model by stock libraries
parity.py       does the export say what the run's model says? bounds, and the comparison
exporter.py     from a run to a folder, read top to bottom
"""
