"""What only an FP8 GPU can show.

`pytest tests/gpu -m gpu` runs the assertions of the CPU on real `torch._scaled_mm` and Transformer
Engine, `python -m tests.gpu.agreement` compares engines with the emulation, and
`python -m tests.gpu.hour` does both and measures everything else in about an hour, one process per
part: GEMM and attention rates, tokens/s and peak memory of 8B runs in FP8 and BF16 beside what the
estimator predicted. It writes `hour.json` and `hour.md`; `--rehearse` runs it in tiny sizes, also
on a CPU.
"""
