"""Import of Transformer Engine's own Python on a CPU, and a test's handle on it.

No file of the engine is changed. `NVTE_PROJECT_BUILDING=1`, its own switch, keeps it from loading
libraries of CUDA; the compiled part is `extension`; a few packages that it wants and never uses
here (triton, onnx) are hollow. Its modules see `torch` through a `_Torch`, which says that there is
a GPU of some compute capability and puts on the CPU what is meant for it: the project, Accelerate
and torch itself see no such thing. Two exceptions: inputs of its layers say `is_cuda`, and the
default device of its `Linear` is the CPU.

The import takes a second and happens once a process; each test gets the modules in `sys.modules`
for its own time, with fresh state.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from typing import Any

import pytest
import torch

from tests.te import extension
from tests.te.fetch import FOLDER

ENGINE = "transformer_engine"
HOLLOW = (f"{ENGINE}.pytorch.triton", f"{ENGINE}.pytorch.onnx_extensions", "einops")
BASE = f"{ENGINE}.pytorch.module.base"

_modules: dict[str, types.ModuleType] = {}
_capability = [(9, 0)]


class _Names:
    """Attributes of something, some of them others."""

    def __init__(self, of: Any, **others: Any) -> None:
        self._of = of
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


class _Device(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.device)

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        named = str(args[0] if args else kwargs.get("type", ""))
        return torch.device("cpu") if named.startswith("cuda") else torch.device(*args, **kwargs)


class _device(metaclass=_Device):  # noqa: N801 - stands for torch.device
    """`torch.device`, for which CUDA is the CPU."""


def _properties(*_: Any) -> types.SimpleNamespace:
    major, minor = _capability[0]
    return types.SimpleNamespace(major=major, minor=minor, multi_processor_count=132)


def _torch() -> Any:
    """`torch` as the engine's modules see it."""
    cuda = _Names(
        torch.cuda,
        is_available=lambda: True,
        current_device=lambda: "cpu",
        get_device_capability=lambda *_: _capability[0],
        get_device_properties=_properties,
        is_current_stream_capturing=lambda: False,
        synchronize=lambda *_: None,
        default_generators={"cpu": torch.default_generator},
    )
    return _Names(
        torch,
        cuda=cuda,
        device=_device,
        version=_Names(torch.version, cuda="12.9"),
        is_autocast_enabled=lambda *_: torch.is_autocast_enabled("cpu"),
        get_autocast_dtype=lambda *_: torch.get_autocast_dtype("cpu"),
    )


class _HollowModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith(HOLLOW):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        made = types.ModuleType(spec.name)
        made.__getattr__ = self._absent  # type: ignore[method-assign]
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""

    @staticmethod
    def _absent(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def _load() -> dict[str, types.ModuleType]:
    """The engine's modules by name, imported when first asked for."""
    if _modules:
        return _modules
    import peft  # noqa: F401 - looks once whether there is an engine, and keeps what it finds

    before, patch = set(sys.modules), pytest.MonkeyPatch()
    with patch.context() as p, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p.setenv("NVTE_PROJECT_BUILDING", "1")
        p.setenv("NVTE_TORCH_COMPILE", "0")
        p.delenv("NVTE_RELEASE_BUILD", raising=False)
        p.setattr(sys, "path", [str(FOLDER), *sys.path])
        p.setattr(sys, "meta_path", [_HollowModules(), *sys.meta_path])
        p.setattr(torch.Tensor, "cuda", lambda x: x)
        sys.modules[extension.NAME] = extension.make()
        common = importlib.import_module(f"{ENGINE}.common")  # its parent looks for the library
        p.setattr(common, "load_framework_extension", lambda _: None)
        te = importlib.import_module(f"{ENGINE}.pytorch")
        importlib.import_module(f"{ENGINE}.pytorch.utils")._empty_tensor()  # cached from here on
    mine = [n for n in sys.modules if n.startswith((ENGINE, "einops")) and n not in before]
    loaded = {name: sys.modules.pop(name) for name in mine}
    seen = _torch()
    for module in loaded.values():
        if module.__dict__.get("torch") is torch:
            module.torch = seen  # type: ignore[attr-defined]
    loaded[f"{ENGINE}.pytorch.distributed"]._lazy_init = lambda: None  # type: ignore[attr-defined]
    init = te.Linear.__init__
    init.__defaults__ = tuple("cpu" if d == "cuda" else d for d in init.__defaults__)
    _modules.update({n: m for n, m in loaded.items() if not n.startswith("einops")})
    return _modules


class Engine:
    """The engine in force: what it keeps process-wide, and what it was seen to do."""

    is_real = True

    def __init__(self, patch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
        """Put the engine into `sys.modules` for one test, on a GPU of this compute capability."""
        modules = _load()
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        own = torch.Tensor.is_cuda

        def is_cuda(x: torch.Tensor) -> bool:
            asks = sys._getframe(1).f_globals.get("__name__")
            return asks == BASE or own.__get__(x)

        patch.setattr(torch.Tensor, "is_cuda", property(is_cuda))
        self._quantization = modules[f"{ENGINE}.pytorch.quantization"]
        manager = self._quantization.FP8GlobalStateManager
        manager.reset()
        self.become(capability)

    def become(self, capability: tuple[int, int]) -> None:
        """Change the GPU that the engine sees."""
        _capability[0] = capability
        for name in ("FP8", "MXFP8", "NVFP4", "FP8_BLOCK_SCALING"):
            setattr(self._quantization, f"_{name}_SUPPORT", None)
        utils = _modules[f"{ENGINE}.pytorch.utils"]
        utils.is_non_tn_fp8_gemm_supported.cache_clear()
        utils._get_device_compute_capability.cache_clear()
        _modules[f"{ENGINE}.pytorch.tensor.nvfp4_tensor"].get_rht_matrix.cache_clear()

    @property
    def _state(self) -> Any:
        return self._quantization.FP8GlobalStateManager.quantization_state

    @property
    def depth(self) -> int:
        """Autocasts that are open."""
        return self._state.autocast_depth

    @property
    def in_fp8(self) -> bool:
        """True within an autocast."""
        return self._state.fp8_enabled

    def watch_forwards(self, patch: pytest.MonkeyPatch) -> list[bool]:
        """A list that grows by an entry a forward of a layer: True in FP8."""
        function, seen = _modules[f"{ENGINE}.pytorch.module.linear"]._Linear, []
        forward = function.forward

        def watched(*args: Any) -> Any:
            seen.append(self.in_fp8)
            return forward(*args)

        patch.setattr(function, "forward", staticmethod(watched))
        return seen


def offer_to_accelerate(patch: pytest.MonkeyPatch) -> type:
    """Make Accelerate see the engine; returns the class of the layers that it builds."""
    import accelerate.accelerator
    import accelerate.utils.dataclasses
    import accelerate.utils.imports
    import accelerate.utils.transformer_engine as at

    for where in (
        accelerate.utils.imports, accelerate.utils.dataclasses, at, accelerate.accelerator,
    ):  # fmt: skip
        patch.setattr(where, "is_transformer_engine_available", lambda: True)
    return sys.modules[f"{ENGINE}.pytorch"].Linear
