"""Training health: observations of a running training, and an end at the first NaN.

`monitor` is the callback that ties it together: `operands` observes GEMM inputs, `moments`
gradients and updates, and `finiteness` checks the losses and gradients of every step.
"""
