"""What a run will take in memory and time, before anyone rents a GPU.

The recipe's own trainer is run for two steps on tensors without memory (`rehearsal`), and what it
allocates and launches is written down (`trace`). From that trace follow the memory it takes on a
given GPU (`allocator`, `hidden`, `sharding`) and the time (`roofline`). `preview` answers from a
closed form in an instant, and `score` says how far both are from published measurements.
"""
