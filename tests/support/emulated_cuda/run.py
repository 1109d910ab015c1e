"""Run Python where CUDA is emulated: a runtime that lives on the host, in the place of NVIDIA's.

    python tests/support/emulated_cuda/run.py -m pytest -m gpu

Builds the libraries first where they are older than their sources. Needs a CUDA build of torch, the
headers that come with it, and a C++20 compiler. `README.md` says what is emulated.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

HERE: Final = Path(__file__).resolve().parent
BUILD: Final = HERE.parents[2] / "build" / "emulated_cuda" / torch.__version__
TORCH: Final = Path(torch.__file__).parent


def _headers(major: str) -> Path:
    """CUDA's headers, of a package or of a toolkit."""
    places = [
        TORCH.parent / "nvidia" / f"cu{major}" / "include",
        *(Path(home) / "include" for home in filter(None, [os.environ.get("CUDA_HOME")])),
        *(home / "include" for home in sorted(Path("/usr/local").glob(f"cuda-{major}*"))),
    ]
    for place in places:
        if (place / "crt" / "host_defines.h").exists():
            return place
    looked = ", ".join(map(str, places))
    sys.exit(
        f"crt/host_defines.h is in none of {looked}; install nvidia-cuda-crt (with pip), or a "
        "CUDA toolkit, and set CUDA_HOME."
    )


def _build(library: Path, sources: Sequence[str], *options: str) -> Path:
    """Compile a library unless it is newer than its sources and every header."""
    parts = [*(HERE / source for source in sources), *HERE.glob("*.h"), HERE / "exported.map"]
    newest = max(file.stat().st_mtime for file in parts)
    if not library.exists() or library.stat().st_mtime < newest:
        BUILD.mkdir(parents=True, exist_ok=True)
        sys.stderr.write(f"building {library.name}\n")
        compiler = os.environ.get("CXX", "c++")
        flags = ("-std=c++20", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared")
        made = library.with_suffix(".made")  # whole or not there
        paths = [str(HERE / source) for source in sources]
        subprocess.run([compiler, *flags, *paths, "-o", str(made), *options], check=True)
        made.rename(library)
    return library


def main() -> None:
    """Build, and become the command."""
    if torch.version.cuda is None:
        sys.exit(f"torch {torch.__version__} is a build without CUDA; install one with CUDA.")
    major = torch.version.cuda.split(".")[0]
    include = f"-I{_headers(major)}"
    runtime = BUILD / f"libcudart.so.{major}"
    exported = HERE / "exported.map"
    BUILD.mkdir(parents=True, exist_ok=True)
    versions = BUILD / "exported.map"
    versions.write_text(exported.read_text().replace("MAJOR", major))
    _build(
        runtime,
        ("streams.cc", "memory.cc", "virtual_memory.cc", "devices.cc", "unsupported.cc"),
        *(include, f"-Wl,-soname,{runtime.name}", f"-Wl,--version-script={versions}"),
    )
    driver = _build(BUILD / "libcuda.so.1", ("driver.cc",), "-Wl,-soname,libcuda.so.1")
    nvml = _build(BUILD / "libnvidia-ml.so.1", ("nvml.cc",), "-Wl,-soname,libnvidia-ml.so.1")
    lib = TORCH / "lib"
    kernels = _build(
        BUILD / "libkernels.so",
        ("kernels.cc",),
        *(include, f"-isystem{TORCH}/include", f"-isystem{TORCH}/include/torch/csrc/api/include"),
        *(f"-L{lib}", "-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"),
        *(str(runtime), f"-Wl,-rpath,{lib}"),
    )
    preloaded = [*map(str, (runtime, driver, nvml)), *os.environ.get("LD_PRELOAD", "").split()]
    found = [str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "LD_PRELOAD": " ".join(preloaded),
        "PYTHONPATH": os.pathsep.join(found),
        "EMULATED_CUDA": str(kernels),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # that kernels are overridden
    }
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, **environment})


if __name__ == "__main__":
    main()
