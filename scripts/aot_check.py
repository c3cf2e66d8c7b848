"""Compile the attention kernels and the decoder for chips that are not here, and look for copies of the page pool.

Runs in an environment of its own, `pip install -e '.[aot]'`, on any Linux machine without accelerators. Shapes alone
are handed to the compilers: no weight exists. A decoder passes when it compiles, when the page pool it is given is
written in place (donated in, aliased out), and when its temporaries could not hold a copy of one layer's pages; a
kernel when it compiles, which it does not if the chip's scalar and vector memory are too small, and when its
temporaries are under a hundredth of the pool, of a decode step on Hopper under five. In neither may the compiled text
copy, transpose or convert an array that has an entry for each page: a copy may also hide in the place of an output.
`ALLOWED` names the exceptions. On an H200 the kernels that a layer of `decode` launches are counted (`aot.launches`):
no more than `aot.chips.KERNELS` records, and no loops or conditionals among them but those of `aot.chips.CONTROL`. So
are the operations of a layer on a TPU v5e under presets that select blocks, by `aot.chips.TPU_KERNELS`.
A program that has passed is not compiled again while its lowered text, what is asked of it, the compilers and the files
that judge it are the same: its line of the report is kept in `~/.cache/et_jax/tests/chips`, with its launches, which
are judged anew by the numbers that are recorded now. ET_JAX_TEST_CACHE names another folder than
`~/.cache/et_jax/tests`; `off` compiles everything.
Where a model is split over a slice of chips, sizes are those of one chip, which must have the memory; what its chips
tell each other is counted as it stands in the text, once for all layers of a loop, and must be what is recorded.
"""

import argparse
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from aot import launches as launching
from aot.chips import HOPPER
from aot.decoders import decoder_programs
from aot.kernels import kernel_programs
from aot.launches import Launches, launches
from aot.notebooks import notebook_programs
from aot.programs import Lowering, Program
from aot.slices import slice_programs

RECORDED = 137  # usual programs when this list was last read; fewer is a failure, more asks for a new number here
NAME_WIDTH = 34
MOST_WORKERS = 4  # compilers at once, of up to 2 GB each

# What a compiler may copy whole. A float for each page and KV head is one byte in 8,192 of the pool, at page size 128
# and head dim 64 in bfloat16; a TPU lays these out pages first for the write and heads first at rest.
ALLOWED = (re.compile("value_radius"),)
INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%?[\w.-]+ = \(?(?P<type>\w+)\[(?P<shape>[\d,]*)\].* "
    r"(?P<op>copy|copy-start|transpose|convert)\("
)


# A part of a fusion whose result lies where its operand does: the layout has another name, and nothing is written.
IN_PLACE = re.compile(r"output_to_operand_aliasing=\{\{\}: \(0, \{\}\)\}, calls=%([\w.-]+)")


FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # what compilers are told by the environment

COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(")
SMALL = 2048  # bytes: some numbers for each row of a batch, where a collective takes its latency alone


def listed() -> list[Program]:
    """Return every program to compile: those of models split over several chips, of one, of notebooks, and kernels.

    What takes long stands before what does not: the last compilers then end together.
    """
    return slice_programs() + decoder_programs() + notebook_programs() + kernel_programs()


def collectives(text: str) -> tuple[str, int]:
    """Return the number of large collectives of each kind in a compiled program, as reported, and of small ones."""
    found = COLLECTIVE.findall(text)
    large = Counter(kind for shape, kind in found if _num_bytes(shape) > SMALL)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(large.items())), len(found) - large.total()


def _num_bytes(shape: str) -> int:
    """Return the bytes of the arrays that the type of an instruction names."""
    arrays = re.findall(r"[a-z]+(\d+)\w*\[([\d,]*)\]", shape)
    return sum(int(bits) // 8 * math.prod(int(size) for size in sizes.split(",") if size) for bits, sizes in arrays)


def whole_copies(text: str, pool: dict[str, Any]) -> list[str]:
    """Return the names of the arrays that a compiled program copies, transposes or converts whole.

    Inside a fusion only the root is written out. An array is known by its number of elements: compilers merge axes. Of
    several with one number the first is named.
    """
    names = {math.prod(array.shape): name for name, array in reversed(pool.items())}
    copied, fused, in_place = {}, False, False
    relabelled = set(IN_PLACE.findall(text))
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.split("(")[0]
            fused, in_place = "fused" in computation, computation.strip(" %") in relabelled
        found = INSTRUCTION.match(line)
        if found is None or in_place or (fused and not found["root"]):
            continue
        name = names.get(math.prod(int(size) for size in found["shape"].split(",") if size))
        copy = f"{found['op']} of {name} as {found['type']}[{found['shape']}]"
        if name is not None and not any(allowed.search(copy) for allowed in ALLOWED):
            copied[copy] = None
    return list(copied)


def check_numbered(number: int) -> tuple[str, bool]:
    """Check a program of the list, which alone can be told to another process."""
    return check(listed()[number])


def check(program: Program) -> tuple[str, bool]:
    """Compile a program, unless it has passed as it is. Return its line of the report, and whether it passed.

    Launches are no part of what has passed: they are judged here in either case.
    """
    began = time.perf_counter()
    heading = f"{program.chip:8} {program.name:{NAME_WIDTH}}"
    try:
        lowering = program.build()
        lowered = lowering.lower()
        passed = passed_file(program, lowering, lowered.as_text())
        if passed is not None and passed.exists():
            sizes, told, launched, before = *read_passed(passed), "(passed before)"
            faults = []
        else:
            compiled = lowered.compile()
            text = compiled.as_text()
            sizes, faults = judged(lowering, compiled.memory_analysis(), text)
            large, small = collectives(text)
            launched = launches(text, counted_loops=program.chip == HOPPER)
            told, before = f"{large}, {small} small" if large else "", ""
            sizes += f" {time.perf_counter() - began:6.1f}"
            if passed is not None and not faults:
                write_passed(passed, sizes, told, launched)
    except Exception as error:  # each compiler has its own; the report is where they belong
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        return f"{heading} FAILED {type(error).__name__}: {reason[:400]}", False
    counted = None
    if lowering.kernels is not None:
        counted = "no loop over layers" if launched is None else launched.told()
        faults += (
            ["no loop over layers is found"]
            if launched is None
            else launched.faults(lowering.kernels, lowering.control, lowering.step_kernels)
        )
    verdict = f"FAILED {'; '.join(faults)}" if faults else "compiled"
    said = "; ".join(filter(None, (lowering.on_chip, told, counted)))
    return " ".join(filter(None, (f"{heading} {sizes} ", verdict, said, before))), not faults


def judged(lowering: Lowering, memory: Any, text: str) -> tuple[str, list[str]]:
    """Return the sizes of a compiled program for the report, and its faults, launches aside."""
    faults = []
    if memory.temp_size_in_bytes >= lowering.temporary_bound:
        faults.append(f"temporaries reach {lowering.temporary_bound / 1e6:.1f} MB: a hidden copy of pages")
    if lowering.in_place and memory.alias_size_in_bytes < lowering.pool_bytes:
        faults.append("the pool is not written in place")
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    if held + memory.temp_size_in_bytes > lowering.memory:
        faults.append(f"a chip has no more than {lowering.memory / 1e9:.0f} GB")
    faults += whole_copies(text, lowering.pool)
    if (large := collectives(text)[0]) != lowering.collectives:
        faults.append(f"the collectives are {large or 'none'}, not {lowering.collectives or 'none'}")
    sizes = (
        memory.temp_size_in_bytes,
        lowering.pool_bytes,
        memory.argument_size_in_bytes,
        memory.alias_size_in_bytes,
    )
    return " ".join(f"{size / 1e6:10.1f}" for size in sizes), faults


def write_passed(path: Path, sizes: str, told: str, launched: Launches | None) -> None:
    """Keep what was found of a program that has passed."""
    counts = None if launched is None else dataclasses.asdict(launched)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps({"sizes": sizes, "told": told, "launches": counts}), encoding="utf-8")
    written.replace(path)


def read_passed(path: Path) -> tuple[str, str, Launches | None]:
    """Return what `write_passed` kept."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return found["sizes"], found["told"], None if found["launches"] is None else Launches(**found["launches"])


def passed_file(program: Program, lowering: Lowering, text: str) -> Path | None:
    """Return the file that holds the report of this very program once it has passed; None where none are kept."""
    if (chosen := os.environ.get("ET_JAX_TEST_CACHE") or "~/.cache/et_jax/tests") == "off":
        return None
    asked = {field.name: str(getattr(lowering, field.name)) for field in dataclasses.fields(lowering)}
    for name in ("lower", "kernels", "control"):
        del asked[name]
    compilers = sorted(f"{one.name} {one.version}" for one in importlib.metadata.distributions())
    flags = [re.sub(r"--xla_gpu_cuda_data_dir=\S+", "", os.environ.get(name, "")) for name in FLAGS]
    judges = [Path(one).read_text(encoding="utf-8") for one in (__file__, launching.__file__)]
    parts = program.chip, program.name, asked, text, compilers, flags, judges
    folder = Path(chosen).expanduser() / "chips"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / hashlib.blake2b(repr(parts).encode(), digest_size=24).hexdigest()


def main() -> int:
    """Compile everything and return the exit code: 1 for any failure, or when the list has become shorter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only programs whose chip and name contain this text"
    )
    parser.add_argument("--all", action="store_true", help="those too that are not usual, for what they take")
    args = parser.parse_args()
    if missing := [name for name in ("libtpu", "jax_plugins.xla_cuda13") if importlib.util.find_spec(name) is None]:
        print(f"{' and '.join(missing)} not installed here; run in an environment with '.[aot]'.", file=sys.stderr)
        return 1
    prepare_environment()
    print(
        f"{'chip':8} {'program':{NAME_WIDTH}} {'temp MB':>10} {'pool MB':>10} {'args MB':>10} {'alias MB':>10} {'s':>6}"
    )
    selected = [
        number
        for number, program in enumerate(listed())
        if (args.all or program.usual) and args.only in f"{program.chip} {program.name}"
    ]
    passed = 0
    workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for line, good in pool.map(check_numbered, selected):
            print(line, flush=True)
            passed += good
    print(f"{passed} of {len(selected)} programs passed")
    if not args.only and len(selected) < RECORDED:
        print(f"{RECORDED} programs are recorded: some have gone from the list.", file=sys.stderr)
        return 1
    return 0 if passed == len(selected) else 1


def prepare_environment() -> None:
    """Tell the compilers that there is no chip, and where ptxas and libdevice lie; before JAX is imported."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing is loaded onto a chip, so a lock left by another run is no matter
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        # Kernels are lowered with the places of their lines; a program is the same in another checkout.
        "JAX_HLO_SOURCE_FILE_CANONICALIZATION_REGEX": f"{Path(__file__).resolve().parents[1]}/",
    }
    spec = importlib.util.find_spec("nvidia.cu13")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / "bin/ptxas").exists():
            os.environ["PATH"] = f"{folder}/bin{os.pathsep}{os.environ['PATH']}"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={folder}".strip()


if __name__ == "__main__":
    sys.exit(main())
