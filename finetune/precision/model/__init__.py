"""What a model is made of: its layers, what a plan says of them, and swaps of classes."""
