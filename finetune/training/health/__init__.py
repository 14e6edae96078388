"""Training health: observations of a running training, and the origin of a NaN.

`monitor` is the callback that ties it together: `operands` observes GEMM inputs, `moments`
gradients and updates. `finiteness` checks every step; when one fails, it runs again
under `nonfinite`, which finds the first broken tensor.
"""
