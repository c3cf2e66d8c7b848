"""What a decode step costs each chip of a slice, and when to split a model: modelled, and not measured.

    python -m scripts.scale > table.md

    milliseconds = bytes of the chip / its bandwidth + collectives x (hops x latency + bytes sent / its links)

A step of `BATCH` sequences of `CONTEXT` tokens reads the chip's weights and pages once. A layer ends in two all-reduces
of the batch's activations; an all-reduce of b bytes over N chips sends 2 b (N - 1) / N. A step ends in `SMALL`
all-reduces of a few numbers a sequence, because the vocabulary is split. Bandwidths are those of the vendors' data
sheets. The latencies of a hop are assumptions: 1 us on a TPU's ring, 10 us for a collective over NVLink.
"""

import dataclasses

from jax.sharding import AbstractMesh

from et_jax.models.config import ExpertConfig, ModelConfig
from et_jax.models.params import num_multiplied
from et_jax.models.sharding import AXIS, bytes_of_chip, sizes, with_copies
from et_jax.serve.loading.chips import GIGABYTES
from scripts.measuring.results import table
from scripts.measuring.shapes import LLAMA_3_8B

BATCH, CONTEXT = 16, 8192
SMALL = 5  # of a step without penalties and truncation, by the compiled programs of `aot_check.py`
USABLE = 0.9


@dataclasses.dataclass(frozen=True)
class Slice:
    """So many chips of a kind, with bytes a second of memory and of all links of a chip, and seconds of a hop."""

    kind: str
    size: int
    memory: float
    links: float
    hop: float
    ring: bool = True

    def collective(self, sent: float) -> float:
        """Return the seconds of a collective in which each chip sends so many bytes."""
        hops = self.size - 1 if self.ring else 1
        return 0.0 if self.size == 1 else hops * self.hop + sent / self.links


SLICES = (
    *(Slice("TPU v5e", size, 819e9, 1600e9 / 8, 1e-6) for size in (1, 8, 16)),
    *(Slice("TPU v6e", size, 1640e9, 3584e9 / 8, 1e-6) for size in (1, 8)),
    *(Slice("H200", size, 4.8e12, 900e9 / 2, 10e-6, ring=False) for size in (1, 8)),
)
LLAMA_3_70B = dataclasses.replace(
    LLAMA_3_8B, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64, windows=(None,) * 80
)
MIXTRAL_8X7B = dataclasses.replace(
    LLAMA_3_8B,
    architecture="mixtral",
    vocab_size=32_000,
    experts=ExpertConfig(num_experts=8, num_per_token=2, width=14_336, normalised=True, layers=(True,) * 32),
)
MODELS = (
    ("Llama-3-8B, bfloat16", LLAMA_3_8B, None),
    ("Llama-3-70B, int8", LLAMA_3_70B, "int8"),
    ("Mixtral-8x7B, int8", MIXTRAL_8X7B, "int8"),
)


def row(name: str, model: ModelConfig, quantize: str | None, over: Slice) -> list[str] | None:
    """Return what a step of a model costs over a slice, None where it cannot be split so or does not fit."""
    if over.size not in sizes(model):
        return None
    split = with_copies(model, over.size)
    weights = bytes_of_chip(split, AbstractMesh((over.size,), (AXIS,)), "bfloat16", quantize)
    pages = 2 * 2 * BATCH * CONTEXT * model.num_layers * split.num_kv_heads * model.head_dim / over.size
    if weights + pages > USABLE * GIGABYTES[over.kind] * 1e9:
        return None
    share = 2 * (over.size - 1) / over.size
    talking = 2 * model.num_layers * over.collective(share * 2 * BATCH * model.hidden_size) + SMALL * over.collective(0)
    seconds = (weights + pages) / over.memory + talking
    flops = 2 * BATCH * num_multiplied(model) / over.size
    rate = BATCH / seconds
    return [
        *(name, f"{over.size} {over.kind}", f"{weights / 1e9:.2f}", f"{pages / 1e9:.2f}", f"{flops / 1e9:.0f}"),
        *(f"{talking * 1e3:.2f}", f"{seconds * 1e3:.1f}", f"{rate:.0f}", f"{rate / over.size:.0f}"),
    ]


def main() -> None:
    """Print the table."""
    columns = ["model", "chips", "GB of weights a chip", "GB of pages a chip", "GFLOP a chip", "ms of collectives"]
    columns += ["ms a step", "tokens/s", "tokens/s a chip"]
    rows = [row(*model, over) for model in MODELS for over in SLICES]
    print(table(columns, [one for one in rows if one is not None]))


if __name__ == "__main__":
    main()
