"""What multiplies: an emulation, torchao, Transformer Engine."""
