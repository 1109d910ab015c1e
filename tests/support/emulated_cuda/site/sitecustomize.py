"""Puts the emulated kernels in place as soon as torch is imported (`run.py` sets PYTHONPATH)."""

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _Loader(importlib.abc.Loader):
    """torch's own loader, and then the kernels."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        ctypes.CDLL(os.environ["EMULATED_CUDA"]).install_kernels()
        module.backends.cudnn.enabled = False
        for name in ("flash", "mem_efficient", "cudnn"):
            getattr(module.backends.cuda, f"enable_{name}_sdp")(False)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if "EMULATED_CUDA" in os.environ:
    sys.meta_path.insert(0, _Finder())
