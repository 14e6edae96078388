"""FP8 compute: decide (`planner`), swap (`convert`), multiply (engines), witness."""
