"""Gives every process with `HOST_GPU` in its environment a GPU made of host memory."""

import os

if os.environ.get("HOST_GPU"):
    from tests.host_gpu.device import install

    install(os.environ["HOST_GPU"])
