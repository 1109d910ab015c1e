"""Run Python where CUDA is emulated: a runtime that lives on the host, in the place of NVIDIA's.

    python tests/support/emulated_cuda/run.py -m pytest -m gpu

Builds the libraries first where they are older than their sources. Needs a CUDA build of torch, the
headers of CUDA's runtime, and a C++20 compiler. `README.md` says what is emulated.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final


def _torch() -> tuple[Path, dict[str, Any]]:
    """Its folder and versions: it loads only with the libraries that are built here."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("torch is not installed.")
    folder = Path(spec.origin).parent
    return folder, runpy.run_path(str(folder / "version.py"))


HERE: Final = Path(__file__).resolve().parent
COMPILER: Final = os.environ.get("CXX", "c++")
TORCH, VERSIONS = _torch()
BUILD: Final = HERE.parents[2] / "build" / "emulated_cuda" / VERSIONS["__version__"]


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
        f"crt/host_defines.h is in none of {looked}; install nvidia-cuda-runtime (with pip), or "
        "a CUDA toolkit, and set CUDA_HOME."
    )


def _build(library: Path, sources: Sequence[str], *options: str) -> Path:
    """Compile a library unless it is newer than its sources and every header."""
    parts = [*(HERE / source for source in sources), *HERE.glob("*.h"), HERE / "exported.map"]
    newest = max(file.stat().st_mtime for file in parts)
    if not library.exists() or library.stat().st_mtime < newest:
        BUILD.mkdir(parents=True, exist_ok=True)
        sys.stderr.write(f"building {library.name}\n")
        flags = ("-std=c++20", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared")
        made = library.with_suffix(".made")  # whole or not there
        paths = [str(HERE / source) for source in sources]
        subprocess.run([COMPILER, *flags, *paths, "-o", str(made), *options], check=True)
        made.rename(library)
    return library


def main() -> None:
    """Build, and become the command."""
    from absent import build_absent  # found where this is run as a script

    cuda = VERSIONS["cuda"]
    if cuda is None:
        sys.exit(f"torch {VERSIONS['__version__']} is a build without CUDA; install one with CUDA.")
    major = cuda.split(".")[0]
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
    absent = BUILD / "absent"
    if not absent.exists():
        made = BUILD / "absent.made"  # whole or not there
        build_absent(TORCH, {file.name for file in (runtime, driver, nvml)}, made, COMPILER)
        made.rename(absent)
    lib = TORCH / "lib"
    kernels = _build(
        BUILD / "libkernels.so",
        ("kernels.cc",),
        *(include, f"-isystem{TORCH}/include", f"-isystem{TORCH}/include/torch/csrc/api/include"),
        *(f"-L{lib}", "-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"),
        *(str(runtime), f"-Wl,-rpath,{lib}", f"-Wl,-rpath-link,{absent}"),
    )
    preloaded = [*map(str, (runtime, driver, nvml)), *os.environ.get("LD_PRELOAD", "").split()]
    libraries = [str(absent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    found = [str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "LD_PRELOAD": " ".join(preloaded),
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONPATH": os.pathsep.join(found),
        "EMULATED_CUDA": str(kernels),
        "OMP_NUM_THREADS": "1",
        "PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK": "1",  # a stand-in has no version
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # that kernels are overridden
    }
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, **environment})


if __name__ == "__main__":
    main()
