"""Compile the decoder for chips that are not here, and look for hidden copies of the page pool.

Runs in an environment of its own, `pip install -e '.[aot]'`, on any Linux machine without accelerators. Shapes alone
are handed to the compilers: no weight exists. A program passes when it compiles, when the page pool it is given is
written in place (donated in, aliased out), and when its temporaries could not hold a copy of one layer's pages.
"""

import argparse
import dataclasses
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

RECORDED = 18  # programs compiled when this list was last read; fewer is a failure, more asks for a new number here
TEMPORARY_SHARE = 0.5  # of one layer's pages: a hidden copy needs all of them

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A chip as its compiler knows it, and the page size (tokens) the decoder has there by default."""

    name: str
    topology: dict[str, Any]
    page_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """A decoder to compile: a model's shape, and how many sequences of how many tokens it holds."""

    name: str
    model: dict[str, Any]
    num_slots: int
    max_length: int
    chunk: int
    backend: str = "xla"


CHIPS = (
    Chip(name="TPU v5e", topology={"platform": "tpu", "topology_name": "v5e:2x2"}, page_size=128),
    Chip(name="TPU v6e", topology={"platform": "tpu", "topology_name": "v6e:2x2"}, page_size=128),
    Chip(
        name="H200",
        topology={"platform": "cuda", "topology_name": "h200", "target_config": H200, "topology": "1x1x1"},
        page_size=64,
    ),
)
SMALL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
}
LLAMA3_8B = {  # all but its 32 layers: they are alike, and each is compiled
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
}
DECODINGS = (
    Decoding(name="small", model=SMALL, num_slots=16, max_length=32768, chunk=256),
    Decoding(name="llama3_8b", model=LLAMA3_8B, num_slots=16, max_length=32768, chunk=512),
)
FUNCTIONS = ("step", "decode", "prefill")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowering:
    """A program about to be compiled, the bytes of its page pool and of one layer of it."""

    lower: Callable[[], Any]
    pool_bytes: int
    layer_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One line of the report. `build` traces nothing yet."""

    name: str
    chip: str
    build: Callable[[], Lowering]


def programs() -> list[Program]:
    """Return every program to compile: the decoder's functions, for every decoder and chip."""
    return [
        Program(
            name=f"{decoding.name} {function} ({decoding.backend})",
            chip=chip.name,
            build=partial(decoder_program, decoding, chip, function),
        )
        for chip in CHIPS
        for decoding in DECODINGS
        for function in FUNCTIONS
    ]


def decoder_program(decoding: Decoding, chip: Chip, function: str) -> Lowering:
    """Return one function of a decoder, on shapes that lie on the chip."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from et_jax import decode
    from et_jax.models.config import ModelConfig
    from et_jax.models.transformer import describe

    device = topologies.get_topology_desc(**chip.topology).devices[0]

    def on_chip(leaf: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=SingleDeviceSharding(device))

    model = ModelConfig(
        architecture="llama",
        num_layers=2,
        windows=(None, None),
        max_positions=decoding.max_length,
        norm_eps=1e-5,
        rope_theta=500000.0,
        **decoding.model,
    )
    config = decode.DecoderConfig(
        model=model,
        num_slots=decoding.num_slots,
        batch=decoding.num_slots,
        page_size=chip.page_size,
        num_pages=decoding.num_slots * decoding.max_length // chip.page_size + 1,
        max_length=decoding.max_length,
        chunk=decoding.chunk,
        max_steps=32,
        cache_dtype=jnp.bfloat16,
        backend=decoding.backend,
    )
    params = jax.tree.map(lambda spec: on_chip(spec, jnp.bfloat16), describe(model))
    state = jax.tree.map(on_chip, jax.eval_shape(partial(decode.empty, config)))
    integer = on_chip(jax.ShapeDtypeStruct((), jnp.int32))
    tokens = on_chip(jax.ShapeDtypeStruct((decoding.chunk,), jnp.int32))
    arguments = {"step": (), "decode": (integer,), "prefill": (integer, tokens, integer)}[function]
    jitted = jax.jit(partial(getattr(decode, function), config), donate_argnums=1)
    layers = [math.prod(layer.pages.shape) * layer.pages.dtype.itemsize for layer in state.cache.layers]
    return Lowering(
        lower=lambda: jitted.lower(params, state, *arguments), pool_bytes=sum(layers), layer_bytes=layers[0]
    )


def check(program: Program) -> tuple[str, bool]:
    """Compile a program. Return its line of the report, and whether it passed."""
    began = time.perf_counter()
    try:
        lowering = program.build()
        memory = lowering.lower().compile().memory_analysis()
    except Exception as error:  # each compiler has its own; the report is where they belong
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        return f"{program.chip:8} {program.name:26} FAILED {type(error).__name__}: {reason[:400]}", False
    faults = []
    bound = int(TEMPORARY_SHARE * lowering.layer_bytes)
    if memory.temp_size_in_bytes >= bound:
        faults.append(f"temporaries reach {TEMPORARY_SHARE:g} of a layer's pages ({bound / 1e6:.1f} MB): a hidden copy")
    if memory.alias_size_in_bytes < lowering.pool_bytes:
        faults.append("the pool is not written in place")
    sizes = (
        memory.temp_size_in_bytes,
        lowering.pool_bytes,
        memory.argument_size_in_bytes,
        memory.alias_size_in_bytes,
    )
    cells = " ".join(f"{size / 1e6:10.1f}" for size in sizes)
    verdict = f"FAILED {'; '.join(faults)}" if faults else "compiled"
    return f"{program.chip:8} {program.name:26} {cells} {time.perf_counter() - began:6.1f}  {verdict}", not faults


def main() -> int:
    """Compile everything and return the exit code: 1 for any failure, or when the list has become shorter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only programs whose chip and name contain this text"
    )
    args = parser.parse_args()
    if missing := [name for name in ("libtpu", "jax_plugins.xla_cuda13") if importlib.util.find_spec(name) is None]:
        print(f"{' and '.join(missing)} not installed here; run in an environment with '.[aot]'.", file=sys.stderr)
        return 1
    prepare_environment()
    print(f"{'chip':8} {'program':26} {'temp MB':>10} {'pool MB':>10} {'args MB':>10} {'alias MB':>10} {'s':>6}")
    selected = [program for program in programs() if args.only in f"{program.chip} {program.name}"]
    passed = 0
    for program in selected:
        line, good = check(program)
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
    }
    spec = importlib.util.find_spec("nvidia.cu13")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / "bin/ptxas").exists():
            os.environ["PATH"] = f"{folder}/bin{os.pathsep}{os.environ['PATH']}"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={folder}".strip()


if __name__ == "__main__":
    sys.exit(main())
