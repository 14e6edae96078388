"""Energy that this process's GPU has drawn, by NVIDIA's management library (extra `energy`).

GPUs since Volta count millijoules themselves. Where that counter is not there (some virtual GPUs),
power is read after each step and taken for the whole step's. Either is of the whole board:
of other programs on it too, and of what it draws while it waits.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

from finetune.errors import install_hint


class EnergyCounter:
    """Counts joules of the current CUDA device.

    Attributes:
        how: what is counted, or why nothing is.
        integrates: `joules` adds power up, and has to be called often.
    """

    def __init__(self, kind: str) -> None:
        """Find the counter of a device of a `kind`, as `Device.kind`; no error without one."""
        self.how, self.integrates = "not measured: no NVIDIA GPU", False
        self._nvml: Any = None
        self._sum, self._at = 0.0, time.perf_counter()
        if kind == "cuda":
            try:
                self._open()
            except ImportError:
                self.how = f"not measured: {install_hint('energy')}"

    def _open(self) -> None:
        import pynvml
        import torch

        try:
            pynvml.nvmlInit()
            # torch counts the visible GPUs, NVML all of them: the UUID is the same for both. That
            # of a MIG slice, which has no counter of its own, is not found.
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self.integrates, self.how = True, "power after each step, times its seconds"
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
                self.integrates, self.how = False, "the GPU's own energy counter"
            if self.integrates:
                pynvml.nvmlDeviceGetPowerUsage(self._handle)
        except pynvml.NVMLError as error:
            self.how = f"not measured: NVML says {error}"
        else:
            self._nvml = pynvml

    def joules(self) -> float:
        """Joules until now, from a moment that stays the same; NaN where nothing is counted."""
        nvml = self._nvml
        if nvml is None:
            return math.nan
        try:
            if not self.integrates:
                return nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3  # mJ
            now, watts = time.perf_counter(), nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        except nvml.NVMLError as error:  # no reason to end a run
            self._nvml, self.how = None, f"not measured: NVML says {error}"
            return math.nan
        self._sum, self._at = self._sum + watts * (now - self._at), now
        return self._sum
