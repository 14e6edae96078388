"""Kernels of our own around the FP8 GEMMs, which all come from torch.

`operators` defines each as an operator of torch with its reference, which CPUs run; `triton_code`
holds what GPUs run. Triton comes with CUDA builds of torch and is imported at the first launch.
`precision.kernels` chooses (`hardware.requirements`), and `finetune.precision.weights` calls.
"""
