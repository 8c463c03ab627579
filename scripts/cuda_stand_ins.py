"""Write stand-ins of the CUDA libraries that a CUDA build of torch is linked with: `cuda_stand_ins.py TORCH/lib`.

torch is imported on a machine without a GPU then. Each library has the functions and versions that torch refers to; a
function returns 100, CUDA's code for "no device", or a text that says so. A build for CPUs needs none, and gets none.
"""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

UNVERSIONED = {
    "libnccl.so.2": "nccl",
    "libcufile.so.0": "cuFile",
    "libcusparseLt.so.0": "cusparseLt",
    "libcuda.so.1": "cu[A-Z]",
}
"""Libraries whose functions have no version: how the names of these begin."""

TEXTS = r"(?!cuGet)\w+Get(Error|Status)?(Name|String)$"
"""Names of functions that return a text: torch reads the texts of errors."""


def output(*command: str | Path) -> str:
    """What a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def undefined(file: Path) -> Iterator[tuple[str, str]]:
    """(name, version or "") of each function that a library takes from another."""
    for line in output("nm", "-D", "--undefined-only", file).splitlines():
        name, _, version = line.split()[-1].partition("@")
        yield name, version.strip("@")


def main(folder: Path) -> None:
    """Write them beside the libraries of torch."""
    files = [file for file in folder.glob("*.so") if re.match(r"lib(torch|c10|caffe2|shm)", file.name)]
    needed: set[str] = set()
    versions: dict[str, set[str]] = defaultdict(set)  # by library
    names: dict[str, set[str]] = defaultdict(set)  # by version
    for file in files:
        headers = output("objdump", "-p", file)
        needed |= {name for name in re.findall(r"NEEDED\s+(\S+)", headers) if re.match(r"lib(cu|nccl|nv)", name)}
        for library, entries in re.findall(r"required from (\S+):\n((?:    0x.*\n)*)", headers):
            versions[library] |= set(re.findall(r"0x\S+ \S+ \d+ (\S+)", entries))
        for name, version in undefined(file):
            names[version].add(name)
    for library in sorted(needed):
        functions = {name for version in versions[library] for name in names[version]}
        if library in UNVERSIONED:
            functions |= {name for name in names[""] if re.match(UNVERSIONED[library], name)}
        write(folder / library, functions, versions[library])


def write(library: Path, functions: set[str], versions: set[str]) -> None:
    """Compile a library of these functions, all with each of the versions (there is one, or none)."""
    source = "".join(map(stand_in, sorted(functions)))
    script = library.with_suffix(".map")
    script.write_text("".join(f"{version} {{ global: *; }};\n" for version in sorted(versions)))
    options = [f"-Wl,--version-script={script}"] if versions else []
    command = ["cc", "-w", "-fno-builtin", "-shared", "-nostdlib", "-x", "c", "-", "-o", library]
    subprocess.run([*command, f"-Wl,-soname,{library.name}", *options], input=source, text=True, check=True)
    script.unlink()


def stand_in(name: str) -> str:
    """The C function of this name."""
    kind, value = ("const char *", '"no device"') if re.match(TEXTS, name) else ("int ", "100")
    return f"{kind}{name}(void) {{ return {value}; }}\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
