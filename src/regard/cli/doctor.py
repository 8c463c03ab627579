"""`regard doctor`: what is installed, what runs here and why, and what is wrong; a report of a bug begins with it."""

import argparse
import json
import warnings
from typing import Any

from regard import __version__
from regard.cli.outputs import STDOUT, add_force, check_outputs, output_files, write_text

WIDTH = 18
"""Characters of the first column."""


def add_to(commands: Any) -> None:
    """Add the command and its options to the parser of `regard`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="show what is installed, what runs here and why, and what is wrong",
        description="Show versions, the compiled library, backends, integrations, caches, and known problems of this "
        "combination. Add the output to a report of a bug: it has paths and environment variables of this machine.",
    )
    parser.add_argument(
        "--json", nargs="?", const=STDOUT, metavar="FILE", help="write it as JSON; without FILE, or with -, to stdout"
    )
    add_force(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look at everything, and show it."""
    check_outputs(output_files(("--json", args.json, "JSON")), force=args.force)
    from regard.cli.diagnosis import diagnose

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what regard warns of is a problem in the report
        found = diagnose()
    if args.json is not None:
        write_text(args.json, json.dumps({"regard": __version__, **found}, indent=1) + "\n")
    if args.json != STDOUT:
        print(text(found))
    return 0


def text(found: dict[str, Any]) -> str:
    """What `diagnose` found, as a table for people."""
    lines = [
        *_versions(found), *_library(found), *_backends(found), *_compiling(found), *_integrations(found),
        *_lines("environment", [f"{name}={value}" for name, value in found["environment"].items()]),
    ]  # fmt: skip
    problems = [f"- {problem}" for problem in found["problems"]] or ["none found"]
    return "\n".join([*lines, "", "problems", *problems])


def _lines(title: str, contents: list[str]) -> list[str]:
    """The contents one below the other, with the title before the first."""
    return [f"{title if i == 0 else '':{WIDTH}}{content}".rstrip() for i, content in enumerate(contents)]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _versions(found: dict[str, Any]) -> list[str]:
    versions, machine, torch = found["versions"], found["machine"], found.get("torch", {})
    tested = f", tested with {', '.join(torch['tested'])}" if torch else ""
    memory = f", {machine['memory'] / 2**30:.0f} GiB" if machine["memory"] else ""
    threads = f", {_counted(torch['threads'], 'thread')} of torch" if torch else ""
    cuda = f", CUDA {torch['cuda']}" if torch.get("cuda") else ""
    return [
        *_lines("regard", [versions["regard"], versions["folder"], versions["install"]]),
        *_lines("torch", [f"{versions['torch'] or 'not installed'}{cuda}{tested}"]),
        *_lines("python", [f"{versions['python']}, {versions['executable']}"]),
        *_lines("numpy", [versions["numpy"] or "not installed"]),
        *_lines("system", [versions["system"]]),
        *_lines(
            "machine", [f"{machine['processor']}, {_counted(machine['processors'], 'processor')}{memory}{threads}"]
        ),
        *_lines("GPU", torch.get("gpus", [])),
    ]


def _library(found: dict[str, Any]) -> list[str]:
    library, check = found["library"], found["check"]
    if library.get("path"):
        contents = [
            f"{library['isa'] or 'none'}: {library['why']}",
            f"compiled and usable here: {', '.join(library['compiled'])}",
            library["path"],
        ]
    else:
        contents = [library.get("absence", "unknown")]
    lines = _lines("compiled library", contents)
    if check:
        same = f"outputs and gradients are torch's, up to {check['largest_difference']:.0e} of the largest element"
        lines += [*_lines("check", [same]), *_lines("OpenMP", check["openmp"])]
    return lines


def _backends(found: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for device, backends in found["backends"].items():
        lines += _lines(f"backends, {device}", [f"{name:12}{state}" for name, state in backends.items()])
    if lines and "cuda" not in found["backends"]:
        built = "finds no GPU" if found["torch"]["cuda"] else "was built without CUDA"
        lines += _lines("backends, cuda", [f"none: torch {built}"])
    return lines


def _compiling(found: dict[str, Any]) -> list[str]:
    compiler = found["compiler"]
    needed = [f"{name}: {place or 'not found'}" for name, place in compiler.items()]
    if not all(compiler.values()):
        needed.append("torch.compile for the CPU, and the backend flex there, need both")
    caches = [
        f"{name}: {cache['bytes'] / 2**20:,.0f} MiB{'' if cache['complete'] else ' or more'} in {cache['folder']}"
        for name, cache in found["caches"].items()
    ]
    return [*_lines("torch.compile", needed), *_lines("compiled caches", [*caches, "regard: in memory only"])]


def _integrations(found: dict[str, Any]) -> list[str]:
    there = {name: each for name, each in found["integrations"].items() if each["version"]}
    absent = [name for name in found["integrations"] if name not in there]
    lines = [f"{name + ' ' + each['version']:32}{each['purpose']}" for name, each in there.items()]
    return _lines("integrations", [*lines, *([f"not installed: {', '.join(absent)}"] if absent else [])])
