"""Every figure that only an FP8 GPU can give, within about an hour: `python -m tests.gpu.hour`.

`parts` lists the commands and reads what they wrote, `__main__` runs them one after another, and
`kernels` measures single products and attention.
"""
