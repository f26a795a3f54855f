"""Compile the kernels: kernels/*.cu to cubins, one PTX and a table of what each kernel takes. No GPU is needed.

The cubins (one an architecture) come from the NVRTC 12.9 line, which any driver from 525 on loads; the PTX, for chips
without a cubin, from NVRTC 12.4, since a driver refuses PTX that is newer than itself. Both are wheels on PyPI that
unpack to nvidia/cuda_nvrtc/lib:

    pip install --no-deps --target target/nvrtc nvidia-cuda-nvrtc-cu12==12.9.86
    pip install --no-deps --target target/nvrtc-ptx nvidia-cuda-nvrtc-cu12==12.4.127
    pip install --no-deps --target target/nvdisasm nvidia-cuda-nvdisasm        (for --check-sass)

    python kernels/build.py --nvrtc target/nvrtc --nvrtc-ptx target/nvrtc-ptx --nvdisasm target/nvdisasm --check-sass

Written to target/kernels: {stem}.{arch}.cubin, {stem}.ptx and resources.json. A kernel that exceeds budget.toml or has
no entry there fails the build, and so does an entry without a kernel. What has not changed is not compiled again.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parent
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
PTX_ARCHITECTURE = "compute_80"
CUBIN_VERSION, PTX_VERSION = (12, 9), (12, 4)
LIBRARY = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
# What ptxas -v says of a kernel, and the names that it has in resources.json.
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
FACTS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "shared": re.compile(r"(\d+) bytes smem"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "spill": re.compile(r"(\d+) bytes spill stores"),
}
LIMITS = ("registers", "shared")
# Local memory, and accesses of which the compiler did not know the memory.
FORBIDDEN = {"LDL": 0, "STL": 0, "LD": 0, "ST": 0}

Resources = dict[str, dict[str, dict[str, int]]]
# How often a kernel has a machine instruction: `[kernel][instruction]`.
Instructions = dict[str, dict[str, int]]


class BuildError(Exception):
    """What is wrong, and what to do about it."""


class Nvrtc:
    """One version of NVIDIA's run-time compiler, which compiles ahead of time just as well."""

    def __init__(self, library: Path, expected: tuple[int, int]) -> None:
        """Load `library` and check its version."""
        builtins = sorted(library.parent.glob("libnvrtc-builtins.so.*"))
        if builtins:
            ctypes.CDLL(str(builtins[0]))
        self._library = ctypes.CDLL(str(library))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "its version")
        self.version = (major.value, minor.value)
        if self.version != expected:
            raise BuildError(f"{library}: found NVRTC {dotted(self.version)}, expected {dotted(expected)}")

    def compile(self, source: Path, headers: dict[str, str], options: list[str], result: str) -> tuple[bytes, str]:
        """Compile one file to its `result` ("PTX" or "CUBIN"); the second value is the log."""
        program = ctypes.c_void_p()
        names, texts = _strings(list(headers)), _strings(list(headers.values()))
        text, name = source.read_text(encoding="utf-8").encode(), source.name.encode()
        created = self._library.nvrtcCreateProgram(ctypes.byref(program), text, name, len(headers), texts, names)
        self._check(created, source.name)
        try:
            code = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._get(program, "ProgramLog").rstrip(b"\0").decode()
            self._check(code, f"{source.name} with {' '.join(options)}", log)
            return self._get(program, result), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
        buffer = ctypes.create_string_buffer(max(1, size.value))
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer), what)
        return buffer.raw[: size.value]

    def _check(self, code: int, what: str, log: str = "") -> None:
        if code != 0:
            raise BuildError(f"{what}: {self._library.nvrtcGetErrorString(code).decode()}\n{log}".rstrip())


def dotted(version: tuple[int, int]) -> str:
    """A version as people write it."""
    return f"{version[0]}.{version[1]}"


def _strings(values: list[str]) -> Any:
    return (ctypes.c_char_p * max(1, len(values)))(*(value.encode() for value in values))


def find_nvrtc(directory: Path | None, option: str, version: tuple[int, int], wheel: str) -> Nvrtc:
    """NVRTC of a directory that pip filled, or of the running interpreter."""
    root = directory or Path(sysconfig.get_paths()["purelib"])
    library = root / LIBRARY
    if not library.exists():
        raise BuildError(
            f"NVRTC {dotted(version)}: found no {library}; "
            f"expected it in {option} DIRECTORY: pip install --no-deps --target DIRECTORY {wheel}"
        )
    return Nvrtc(library, version)


def read_budget(path: Path) -> dict[str, dict[str, Any]]:
    """Kernels and their limits. Reads what the file uses of TOML: lines `name = {key = value, ...}`, and comments."""
    budget: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text or text == "[kernels]":
            continue
        name, _, value = text.partition("=")
        try:
            limits = json.loads(re.sub(r'"?([\w.]+)"?\s*=', r'"\1":', value.strip()))
        except ValueError as error:
            raise BuildError(f"{path}:{number}: found {line!r}, expected `kernel = {{registers = 32, ...}}`") from error
        missing = [limit for limit in LIMITS if limit not in limits]
        if missing:
            raise BuildError(f"{path}:{number}: {name.strip()} has no {' and no '.join(missing)}")
        budget[name.strip()] = limits
    return budget


def parse_resources(log: str) -> Resources:
    """What ptxas says of each kernel: `[kernel][architecture][fact]`."""
    resources: Resources = {}
    facts: dict[str, int] = {}
    for line in log.splitlines():
        if entry := ENTRY.search(line):
            facts = resources.setdefault(entry[1], {})[entry[2]] = dict.fromkeys(FACTS, 0)
        for name, pattern in FACTS.items():
            if found := pattern.search(line):
                facts[name] = int(found[1])
    return resources


class Build:
    """One run: what is there already, what is made, what is known of it."""

    def __init__(self, out: Path, cubins: Nvrtc, ptx: Nvrtc, nvdisasm: Path | None = None) -> None:
        """Results go to `out`; with a disassembler, what machine code has is counted too."""
        out.mkdir(parents=True, exist_ok=True)
        self._out, self._cubins, self._ptx, self._nvdisasm = out, cubins, ptx, nvdisasm
        self._headers = {path.name: path.read_text(encoding="utf-8") for path in sorted(KERNELS.glob("*.cuh"))}
        self._state_path = out / "build-state.json"
        self._old: dict[str, Any] = {}
        if self._state_path.exists():
            self._old = json.loads(self._state_path.read_text(encoding="utf-8"))

    def run(self) -> tuple[Resources, dict[str, Instructions]]:
        """Everything, as many at a time as there are processors. What succeeds is kept even if something else fails.

        The second value has the instructions of each file that were counted.
        """
        sources = sorted(KERNELS.glob("*.cu"), key=lambda source: -source.stat().st_size)
        jobs = [(source, architecture) for source in sources for architecture in (PTX_ARCHITECTURE, *ARCHITECTURES)]
        state: dict[str, Any] = {}
        errors = []
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = {pool.submit(self._make, *job): self._path(*job).name for job in jobs}
            for future in as_completed(futures):
                try:
                    state[futures[future]] = future.result()
                except BuildError as error:
                    errors.append(str(error))
                self._state_path.write_text(json.dumps({**self._old, **state}), encoding="utf-8")
        if errors:
            raise BuildError("\n".join(errors))
        self._state_path.write_text(json.dumps(state), encoding="utf-8")
        for path in [*self._out.glob("*.cubin"), *self._out.glob("*.ptx")]:
            if path.name not in state:
                path.unlink()
        resources: Resources = {}
        instructions: dict[str, Instructions] = {}
        for source, architecture in sorted(jobs):
            name = self._path(source, architecture).name
            for kernel, facts in state[name]["resources"].items():
                resources.setdefault(kernel, {}).update(facts)
            instructions[name] = state[name].get("instructions", {})
        (self._out / "resources.json").write_text(json.dumps(resources, indent=1), encoding="utf-8")
        return resources, instructions

    def _texts(self, text: str) -> list[str]:
        """A source and the headers that it includes, whatever they include themselves among them."""
        names = re.findall(r'^#include "(.+)"', text, re.MULTILINE)
        return [text, *(part for name in names for part in self._texts(self._headers.get(name, "")))]

    def _path(self, source: Path, architecture: str) -> Path:
        return self._out / f"{source.stem}.{'ptx' if architecture == PTX_ARCHITECTURE else architecture + '.cubin'}"

    def _make(self, source: Path, architecture: str) -> dict[str, Any]:
        """One cubin, or the PTX, unless it is there already; what is known of it."""
        is_ptx, path = architecture == PTX_ARCHITECTURE, self._path(source, architecture)
        options = [f"--gpu-architecture={architecture}", "--std=c++17", *([] if is_ptx else ["--ptxas-options=-v"])]
        compiler, result = (self._ptx, "PTX") if is_ptx else (self._cubins, "CUBIN")
        content = [*self._texts(source.read_text(encoding="utf-8")), *options, str(compiler.version)]
        digest = hashlib.sha256("\0".join(content).encode()).hexdigest()
        known = dict(self._old.get(path.name, {}))
        if known.get("digest") != digest or not path.exists():
            binary, log = compiler.compile(source, self._headers, options, result)
            if "warning" in log:
                raise BuildError(f"{source.name} for {architecture}: found warnings, expected none\n{log}")
            path.write_bytes(binary.rstrip(b"\0") if is_ptx else binary)
            known = {"digest": digest, "resources": {} if is_ptx else parse_resources(log)}
        if self._nvdisasm and not is_ptx and "instructions" not in known:
            known["instructions"] = count_instructions(self._nvdisasm, path)
        return known


def excesses(budget: dict[str, dict[str, Any]], resources: Resources) -> list[str]:
    """One line for each kernel and architecture that takes more than it may, or that one side does not know."""
    found = [f"{name}: found no entry in budget.toml" for name in resources if name not in budget]
    found += [f"{name}: budget.toml has it, and no source does" for name in budget if name not in resources]
    for name, architectures in resources.items():
        for architecture, facts in architectures.items():
            limits = {**budget.get(name, {}), **budget.get(name, {}).get(architecture, {})}
            found += [
                f"{name} for {architecture}: found {facts[limit]} {limit}, expected at most {limits[limit]}"
                for limit in LIMITS
                if facts[limit] > limits.get(limit, facts[limit])
            ]
            found += [
                f"{name} for {architecture}: found {facts[fact]} bytes of {fact}, expected none"
                for fact in ("spill", "stack")
                if facts[fact] > 0
            ]
    return found


def count_instructions(nvdisasm: Path, cubin: Path) -> Instructions:
    """How often each kernel of a cubin has each machine instruction."""
    listing = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        raise BuildError(f"{cubin.name}: nvdisasm: {listing.stderr.strip()}")
    counts: Instructions = {}
    kernel: dict[str, int] = {}
    for line in listing.stdout.splitlines():
        if section := re.match(r"\.text\.(\w+):", line.strip()):
            kernel = counts.setdefault(section[1], {})
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            kernel[found[1]] = kernel.get(found[1], 0) + 1
    return counts


def sass_faults(budget: dict[str, dict[str, Any]], cubin: str, counts: Instructions) -> list[str]:
    """What the budget expects of the machine code and does not find, and what nobody may use."""
    found = []
    for name, instructions in counts.items():
        expected = {**budget.get(name, {}).get("sass", {}), **FORBIDDEN}
        for wanted, least in expected.items():
            parts = set(wanted.split("."))
            number = sum(count for opcode, count in instructions.items() if parts <= set(opcode.split(".")))
            if number < least or (least == 0 and number > 0):
                bound = f"at least {least}" if least else "none"
                found.append(f"{name} in {cubin}: found {number} {wanted}, expected {bound}")
    return found


def print_table(budget: dict[str, dict[str, Any]], resources: Resources) -> None:
    """Registers of each architecture, the worst static shared memory, and the limits."""
    width = max(map(len, resources), default=0)
    print(f"{'kernel':{width}}  " + "".join(f"{arch:>8}" for arch in ARCHITECTURES) + "   limit   shared   limit")
    for name, architectures in resources.items():
        registers = "".join(f"{architectures[arch]['registers']:>8}" for arch in ARCHITECTURES)
        shared = max(facts["shared"] for facts in architectures.values())
        limits = [f"{budget.get(name, {}).get(limit, '-'):>8}" for limit in LIMITS]
        print(f"{name:{width}}  {registers}{limits[0]}{shared:>9}{limits[1]}")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    here = "default: the running interpreter's site-packages"
    add("--nvrtc", type=Path, metavar="DIRECTORY", help=f"where NVRTC 12.9 was installed; {here}")
    add("--nvrtc-ptx", type=Path, metavar="DIRECTORY", help=f"where NVRTC 12.4 was installed; {here}")
    add(
        "--out",
        type=Path,
        metavar="DIRECTORY",
        default=KERNELS.parent / "target/kernels",
        help="default: target/kernels",
    )
    add("--check-sass", action="store_true", help="check the machine code too")
    add("--nvdisasm", type=Path, metavar="DIRECTORY", help=f"where nvidia-cuda-nvdisasm was installed; {here}")
    return parser.parse_args()


def find_nvdisasm(directory: Path | None) -> Path:
    """The disassembler of a directory that pip filled, or of the running interpreter."""
    root = directory or Path(sysconfig.get_paths()["purelib"])
    found = sorted(root.glob("nvidia/**/bin/nvdisasm"))
    if not found:
        raise BuildError(
            f"nvdisasm: found none in {root}; expected it in --nvdisasm DIRECTORY: "
            "pip install --no-deps --target DIRECTORY nvidia-cuda-nvdisasm"
        )
    return found[0]


def run(arguments: argparse.Namespace) -> list[str]:
    """Everything; returns what is wrong with the kernels."""
    wheel = "nvidia-cuda-nvrtc-cu12"
    cubins = find_nvrtc(arguments.nvrtc, "--nvrtc", CUBIN_VERSION, f"{wheel}==12.9.86")
    ptx = find_nvrtc(arguments.nvrtc_ptx, "--nvrtc-ptx", PTX_VERSION, f"{wheel}==12.4.127")
    budget = read_budget(KERNELS / "budget.toml")
    out: Path = arguments.out
    nvdisasm = find_nvdisasm(arguments.nvdisasm) if arguments.check_sass else None
    resources, instructions = Build(out, cubins, ptx, nvdisasm).run()
    print_table(budget, resources)
    faults = excesses(budget, resources)
    if arguments.check_sass:
        for cubin, counts in instructions.items():
            faults += sass_faults(budget, cubin, counts)
    return faults


def main() -> None:
    """Build, and exit with 1 if a kernel exceeds its budget, with 2 if nothing could be built."""
    try:
        faults = run(parse_arguments())
    except BuildError as error:
        print(f"kernels/build.py: {error}", file=sys.stderr)
        sys.exit(2)
    for fault in faults:
        print(f"kernels/build.py: {fault}", file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
