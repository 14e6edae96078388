"""Training health: what is observed while a run trains, and where a NaN began.

`monitor` is the callback that ties it together. `collector` looks at the operands of the matmuls
(`tallies`, `groups` fold them into rows), `moments` at gradients and updates, `speed` and
`utilisation` at time. `finiteness` checks every step; when it fails, `replay` runs the step again
for `nonfinite` to find the first tensor that broke, and `cure` says what to try.
"""
