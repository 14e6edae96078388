"""Training health: what is observed while a run trains, and where a NaN began.

`monitor` is the callback that ties it together: `operands` looks at what the matmuls are fed,
`moments` at gradients and updates, `speed` at time. `finiteness` checks every step; when one fails,
it runs again under `nonfinite`, which finds the first tensor that broke.
"""
