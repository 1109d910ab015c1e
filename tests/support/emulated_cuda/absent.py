"""Libraries of CUDA that torch links to and that are not installed, as names without contents.

A CUDA build of torch is 0.6 GB to fetch. What it links to (cuBLAS, cuDNN, NCCL, ...) is another
2.5, of which nothing is called where CUDA is emulated. So each of these that is absent gets a
stand-in with the symbols that torch asks of it, under the versions that it asks for. Whoever calls
one reads "not supported".
"""

import re
import subprocess
from pathlib import Path
from typing import Final

_NEEDED: Final = re.compile(r"Shared library: \[(lib((?:cu|nccl|nv)\w*)\.so\.\d+)\]")
_VERSION: Final = re.compile(r"File: (\S+) .*\n.* Name: (\S+)")
_UNDEFINED: Final = re.compile(r"^ +[Uw] (\w+)(?:@(\S+))?$", re.MULTILINE)


def build_absent(torch: Path, there: set[str], folder: Path, compiler: str) -> None:
    """Build each library that one of torch's needs, and is neither `there` nor beside torch."""
    folder.mkdir(parents=True, exist_ok=True)
    there = there | {path.name for path in torch.parent.glob("nvidia/**/lib/lib*.so.*")}
    users = sorted((torch / "lib").glob("lib*.so"))
    needed = {name: family for user in users for name, family in _NEEDED.findall(_read(user))}
    absent = {name: family for name, family in needed.items() if name not in there}
    versions = {name: name for name in absent}
    wanted: dict[str, set[str]] = {name: set() for name in absent}
    for user in users if absent else ():
        versions |= {n: v for n, v in _VERSION.findall(_read(user, "-V")) if n in absent}
        said = _run("nm", "-D", "--with-symbol-versions", str(user))
        for symbol, version in _UNDEFINED.findall(said):
            for name, family in absent.items():
                is_its = symbol.lower().startswith(family.lower().removesuffix("_host"))
                if version == versions[name] or (not version and is_its):
                    wanted[name].add(symbol)
    for name, symbols in wanted.items():
        source = folder / f"{name}.c"
        source.write_text("".join(f"int {s}(void) {{ return 801; }}\n" for s in sorted(symbols)))
        script = folder / f"{name}.map"
        script.write_text(f"{versions[name]} {{ global: *; }};\n")
        options = ("-shared", "-fPIC", f"-Wl,-soname,{name}", f"-Wl,--version-script={script}")
        _run(compiler, *options, "-x", "c", str(source), "-o", str(folder / name))


def _read(library: Path, what: str = "-d") -> str:
    return _run("readelf", what, "-W", str(library))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
