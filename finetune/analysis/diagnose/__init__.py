"""What really ran in which precision, where the time went, and why FP8 is or is not faster."""
