"""Time decode attention against a plain copy of memory, and against the share of the blocks it reads.

Runs on whatever device is here: sizes for a GPU or TPU, smaller ones for a CPU. Every backend that serves the device
reads all blocks, then 1/2, 1/4, 1/8 and 1/16 of them. Beside them, where they are installed, what attends to the same
tokens laid out in order: two products in XLA, cuDNN's attention, and PyTorch's.

A timed run is a chain of calls, each over tokens of its own, so that no cache holds what is asked for. Contestants take
turns, round after round; medians are shown. A copy is counted for what it reads and writes, attention for the keys
and values it must read. Writes JSON, and a picture of time against the share of blocks read.
"""

import dataclasses
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory of its own

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from et_jax.evidence.figures import pyplot
from et_jax.io.files import replace_picture
from et_jax.pallas.backend import resolve
from et_jax.pallas.paged_attention.api import BACKENDS, paged_attention
from et_jax.softmax import Softmax
from scripts.measuring import arguments
from scripts.measuring.results import RESULTS, write

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Shape of a decode step: `batch` queries, each over `context` tokens. The heads are those of Llama-3-8B."""

    batch: int
    context: int
    page_size: int
    dtype: str
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.context // 1024}k, pages of {self.page_size}"

    @property
    def num_blocks(self) -> int:
        return self.context // self.page_size

    @property
    def dense_bytes(self) -> int:
        """Bytes of all keys and values."""
        width = 2 * self.head_dim * jnp.dtype(self.dtype).itemsize
        return self.batch * self.num_kv_heads * self.context * width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What a device is asked. spread: bytes a chain of calls covers, more than its caches hold."""

    cases: tuple[Case, ...]
    copied: int
    spread: int


def setup(platform_name: str) -> Setup:
    """Return the cases for a platform, the bytes of the copy, and the spread."""
    if platform_name == "cpu":
        sizes = [(b, s) for b in (1, 2) for s in (16, 64)]  # decode runs at two rows or more
        cases = tuple(Case(batch=b, context=16384, page_size=s, dtype="float32") for b, s in sizes)
        return Setup(cases=cases, copied=2**27, spread=2**26)
    sizes = [(batch, context) for batch in (1, 8, 64) for context in (1024, 8192, 32768, 131072)]
    sizes = [(batch, context) for batch, context in sizes if batch * context <= 64 * 32768]
    pages = 64 if platform_name == "gpu" else 128
    other = 128 if platform_name == "gpu" else 64
    cases = [Case(batch=b, context=t, page_size=pages, dtype="bfloat16") for b, t in sizes]
    cases += [Case(batch=b, context=t, page_size=other, dtype="bfloat16") for b, t in ((8, 131072), (64, 32768))]
    return Setup(cases=tuple(cases), copied=2**31, spread=2**27)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contestant:
    """One line of the report. run: does its chain of calls and waits. num_bytes: what one call must move."""

    name: str
    share: float
    num_bytes: int
    num_calls: int
    run: Callable[[], None]


def served_backends() -> list[str]:
    """Return the backends that serve this device, but for the definition."""
    served = []
    for backend in BACKENDS:
        try:
            served.append(resolve(backend, BACKENDS))
        except NotImplementedError as reason:
            print(reason)
    return [backend for backend in served if backend != "reference"]


def paged_contestants(case: Case, spread: int, backends: list[str]) -> list[Contestant]:
    """Return every one of the backends, at every share of the blocks."""
    num_chains = max(2, int(spread / (case.dense_bytes * min(SHARES))))
    b, k, n = case.batch, case.num_kv_heads, case.num_blocks
    rng = np.random.default_rng(0)
    tables = jnp.asarray(rng.permutation(num_chains * b * n).reshape(num_chains, b, n) + 1, jnp.int32)
    pool = (k, 1 + num_chains * b * n, case.page_size, 2 * case.head_dim)
    pages = jax.jit(lambda: jax.random.normal(jax.random.key(0), pool, case.dtype))()
    query = jnp.ones((b, case.num_heads, case.head_dim), case.dtype)
    lengths = jnp.full(b, case.context, jnp.int32)

    def chain(backend: str, query: Array, pages: Array, tables: Array, blocks: Array, counts: Array) -> Array:
        def call(i: Array, query: Array) -> Array:
            softmax = Softmax(scale=case.head_dim**-0.5)
            out, _ = paged_attention(query, pages, tables[i], blocks, counts, lengths, softmax=softmax, backend=backend)
            return out

        return lax.fori_loop(0, num_chains, call, query)

    contestants = []
    for backend in backends:
        try:
            for share in SHARES:
                num_listed = max(1, round(n * share))
                blocks = np.stack([_listed(rng, n, num_listed) for _ in range(b * k)]).reshape(b, k, n)
                counts = jnp.full((b, k), num_listed, jnp.int32)
                arguments = (query, pages, tables, jnp.asarray(blocks, jnp.int32), counts)
                program = jax.jit(partial(chain, backend)).lower(*arguments).compile()
                contestants.append(
                    Contestant(
                        name=backend,
                        share=share,
                        num_bytes=case.dense_bytes * num_listed // n,
                        num_calls=num_chains,
                        run=partial(_run, program, *arguments),
                    )
                )
        except NotImplementedError as reason:
            print(f"{case.name}: {reason}")
    return contestants


def _listed(rng: np.random.Generator, num_blocks: int, num_listed: int) -> np.ndarray:
    """Return a list of blocks in ascending order, the last among them, padded to all blocks."""
    chosen = np.sort(rng.choice(num_blocks - 1, num_listed - 1, replace=False))
    return np.pad(np.append(chosen, num_blocks - 1), (0, num_blocks - num_listed))


def _run(program: Callable[..., Array], *arguments: Array) -> None:
    program(*arguments).block_until_ready()


def einsum_attention(query: Array, key: Array, value: Array) -> Array:
    """Return attention of queries "b k g d" over "b k t d", as XLA makes it of two products and a softmax."""
    b, k, g, d = query.shape
    query, key, value = (x.reshape(b * k, -1, d) for x in (query, key, value))
    scores = jnp.einsum("xgd,xtd->xgt", query, key, preferred_element_type=jnp.float32) * d**-0.5
    weights = jax.nn.softmax(scores).astype(value.dtype)
    mixed = jnp.einsum("xgt,xtd->xgd", weights, value, preferred_element_type=jnp.float32)
    return mixed.astype(value.dtype).reshape(b, k, g, d)


def cudnn_attention(query: Array, key: Array, value: Array) -> Array:
    """Return attention of queries "b 1 h d" over "b t k d"."""
    return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")


def contiguous_contestants(case: Case, spread: int) -> list[Contestant]:
    """Return what attends to all tokens laid out in order, each in the layout it reads best."""
    num_calls = max(2, min(64, spread // case.dense_bytes))
    b, t, k, h, d = case.batch, case.context, case.num_kv_heads, case.num_heads, case.head_dim
    candidates = {"contiguous einsum": (einsum_attention, (b, k, h // k, d), (b, k, t, d))}
    if jax.default_backend() == "gpu":
        candidates["contiguous cudnn"] = (cudnn_attention, (b, 1, h, d), (b, t, k, d))
    runs = {}
    for name, (attention, query_shape, cache_shape) in candidates.items():
        normal = jax.jit(lambda seed, shape=cache_shape: jax.random.normal(jax.random.key(seed), shape, case.dtype))
        caches = [(normal(2 * i), normal(2 * i + 1)) for i in range(num_calls)]
        arguments = (jnp.ones(query_shape, case.dtype), caches)
        try:
            runs[name] = partial(_run, jax.jit(partial(_chain, attention)).lower(*arguments).compile(), *arguments)
        except (RuntimeError, NotImplementedError, ValueError) as reason:
            print(f"{case.name}: {name}: {str(reason).splitlines()[0]}")
    if jax.default_backend() == "gpu" and (run := _torch_chain(case, num_calls)):
        runs["contiguous torch"] = run
    entry = partial(Contestant, share=1.0, num_bytes=case.dense_bytes, num_calls=num_calls)
    return [entry(name=name, run=run) for name, run in runs.items()]


def _chain(attention: Callable[..., Array], query: Array, caches: list[tuple[Array, Array]]) -> Array:
    for key, value in caches:
        query = attention(query, key, value)
    return query


def _torch_chain(case: Case, num_calls: int) -> Callable[[], None] | None:
    """Return PyTorch's attention over as many caches, or None where it is not installed for this GPU."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    dtype = getattr(torch, case.dtype)
    cache = (2, case.batch, case.num_kv_heads, case.context, case.head_dim)
    caches = [torch.randn(cache, device="cuda", dtype=dtype) for _ in range(num_calls)]
    start = torch.ones((case.batch, case.num_heads, 1, case.head_dim), device="cuda", dtype=dtype)

    def run() -> None:
        query = start
        for key, value in caches:
            query = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        torch.cuda.synchronize()

    return run


def copy_contestant(num_bytes: int) -> Contestant:
    """Return a plain pass over memory: every byte read, changed and written, in place, so that none is allocated."""
    program = jax.jit(jnp.negative, donate_argnums=0)
    held = [jnp.ones(num_bytes // 4, jnp.float32)]

    def run() -> None:
        held[0] = program(held[0]).block_until_ready()

    return Contestant(name="copy", share=1.0, num_bytes=2 * num_bytes, num_calls=1, run=run)


def measure(contestants: list[Contestant], rounds: int) -> dict[tuple[str, float], np.ndarray]:
    """Return milliseconds a call, round by round, for every contestant by name and share."""
    times: dict[tuple[str, float], list[float]] = {(c.name, c.share): [] for c in contestants}
    for contestant in contestants:
        contestant.run()
    for _ in range(rounds):
        for contestant in contestants:
            began = time.perf_counter()
            contestant.run()
            taken = (time.perf_counter() - began) / contestant.num_calls
            times[contestant.name, contestant.share].append(taken * 1e3)
    return {key: np.array(values) for key, values in times.items()}


def report(case: Case, contestants: list[Contestant], times: dict[tuple[str, float], np.ndarray]) -> list[dict]:
    """Print and return one row a contestant. Ratios are medians over the rounds, each against its own round."""
    copied = next(c for c in contestants if c.name == "copy")
    speed = {(c.name, c.share): c.num_bytes / times[c.name, c.share] for c in contestants}
    rows = []
    print(f"{case.name}\n  {'':18} {'share':>7} {'ms':>9} {'GB/s':>8} {'of copy':>8} {'of dense':>9} {'ideal':>7}")
    for c in contestants:
        key, dense = (c.name, c.share), times.get((c.name, 1.0))
        row: dict[str, Any] = dataclasses.asdict(case) | {
            "name": c.name,
            "share": c.share,
            "bytes": c.num_bytes,
            "median_ms": float(np.median(times[key])),
            "gb_per_s": float(np.median(speed[key])) / 1e6,
            "share_of_copy": float(np.median(speed[key] / speed[copied.name, copied.share])),
            "time_of_dense": float(np.median(times[key] / dense)) if dense is not None else None,
        }
        rows.append(row)
        print(
            f"  {c.name:18} {c.share:7.4f} {row['median_ms']:9.4f} {row['gb_per_s']:8.1f} {row['share_of_copy']:8.3f} "
            f"{row['time_of_dense']:9.3f} {c.share:7.4f}"
        )
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Draw time against the share of blocks read, a panel a case, with the line of time in proportion."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["name"] != "copy":
            groups.setdefault((row["batch"], row["context"], row["page_size"]), []).append(row)
    columns = min(4, len(groups))
    rows_of_panels = -(-len(groups) // columns)
    size = (4.2 * columns, 3.8 * rows_of_panels)
    figure, axes = pyplot().subplots(rows_of_panels, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(groups) :]:
        axis.set_visible(False)
    for axis, ((batch, context, page_size), group) in zip(axes.flat, groups.items(), strict=False):
        for name in dict.fromkeys(row["name"] for row in group):
            points = [(row["share"], row["median_ms"]) for row in group if row["name"] == name]
            if len(points) > 1:
                (line,) = axis.plot(*zip(*points, strict=True), marker="o", label=name)
                dense = points[0][1]
                axis.plot([s for s, _ in points], [s * dense for s, _ in points], ":", color=line.get_color())
            else:
                axis.axhline(points[0][1], color="0.5", linewidth=0.8)
                axis.annotate(name, (min(SHARES), points[0][1]), fontsize=7, color="0.4", va="bottom")
        axis.set(xscale="log", yscale="log", xlabel="share of blocks read", ylabel="ms a call")
        axis.set_title(f"{batch} x {context // 1024}k, pages of {page_size}", fontsize=9)
        axis.legend(fontsize=7, title="dotted: in proportion", title_fontsize=7)
    replace_picture(path, figure, dpi=130)


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("--rounds", type=arguments.count(), default=15)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this text")
    parser.add_argument(
        "--output", type=arguments.output, help="JSON; by default benchmarks/results/kernels-DEVICE.json"
    )
    args = parser.parse_args()
    device = jax.devices()[0]
    wanted = setup(device.platform)
    output = args.output or RESULTS / f"kernels-{device.device_kind.lower().replace(' ', '-')}.json"
    rows: list[dict] = []
    backends = served_backends()
    for case in wanted.cases:
        if args.only not in case.name:
            continue
        contestants = [copy_contestant(wanted.copied)]
        contestants += paged_contestants(case, wanted.spread, backends)
        contestants += contiguous_contestants(case, wanted.spread)
        rows += report(case, contestants, measure(contestants, args.rounds))
    write(output, "scripts/bench_kernels.py", {"rounds": args.rounds}, rows=rows)
    draw(rows, output.with_suffix(".png"))


if __name__ == "__main__":
    main()
