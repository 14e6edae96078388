"""How far predictions are from published measurements.

A row of a csv file (`rows`) becomes a `Job` (`jobs`), with what its software stack does to memory
(`stacks`), on a model known by its shape (`shapes`). `simulate` runs that job on tensors without
memory; `scoreboard` compares, one kind of memory at a time. No row is dropped silently, and no row
has a correction of its own.
"""
