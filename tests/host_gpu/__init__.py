"""A CUDA device made of host memory: what only a GPU takes runs on a machine without one.

    export HOST_GPU=H100 PYTHONPATH=$PWD:$PWD/tests/host_gpu/site    # or 4090, L40S, B200, 5090
    export HOST_GPU_GIB=0.1          # where it is to run out of memory
    pytest -m gpu tests/gpu
    python -m tests.gpu.hour --rehearse
    python -m finetune tiny_lora_fp8

Tensors of `cuda:0` are real tensors: dispatch, autocast, devices of operands, the thread in which
autograd runs backward, memory and random states are those of CUDA, and operators that CUDA alone
has are behind the checks of its kernels. Needs g++ on Linux and a torch without CUDA. Not shown:
Triton's kernels and Inductor's code, whose place references take, libraries of CUDA (bitsandbytes,
Transformer Engine), how long anything takes, and arithmetic that differs from a CPU's.
"""
