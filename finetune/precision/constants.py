"""Choices that were measured once and are no settings, in one place.

Nobody's recipe is better with another value, so none can be asked for; benchmarks and tests that
measure one set it here (`unittest.mock.patch`). They are read when a model is converted
or a layer runs.
"""

SAVED_INPUT = "fp8"
"""What an adapter over a base stored in FP8 keeps of its input for backward: the codes that forward
made of it. `high` keeps the input itself: the gradient of A is nearer to BF16 by a few percent,
for twice the bytes (`tests/benchmarks/lora_memory.py`)."""

FUSED_ADAPTERS = True
"""Low-rank adapters run in one autograd function with their frozen base layer. False leaves them as
PEFT has them: the stock stack that benchmarks compare with."""

FAST_ACCUM = True
"""Over a base stored in FP8, tensor cores add products with fewer digits, without promotion to
float32 every few of them (`use_fast_accum` of `torch._scaled_mm`), and are 1.1 to 1.2 times as
fast; the emulation always adds in float32."""

HADAMARD = True
"""NVFP4: random Hadamard transform of the operands of the weight gradient."""

STOCHASTIC_ROUNDING = True
"""NVFP4: gradients are rounded by chance, so that the mean is right."""
