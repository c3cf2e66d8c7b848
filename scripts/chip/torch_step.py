"""A plain step of the same shapes in torch, captured as one CUDA graph: no engine, what anybody can have."""

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from et_jax.models.config import ModelConfig
from scripts.chip.cases import Case, Settings
from scripts.measuring.shapes import SHAPES

DEVIATION = 0.02  # of random weights


def measured(cases: Sequence[Case], settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield what is found of each case, in order. All cases are of one shape."""
    torch = importlib.import_module("torch")
    shape = SHAPES[cases[0].shape]
    with torch.no_grad():
        torch.manual_seed(settings.seed)
        weights = weights_of(torch, shape)
        for case in cases:
            yield {"milliseconds": timed(torch, step_of(torch, shape, weights, case), settings)}


def weights_of(torch: Any, shape: ModelConfig) -> dict[str, Any]:
    """Return random weights of a shape: what is multiplied by a layer at once lies in one matrix."""
    e, i, heads = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim
    sizes = {"qkv": (heads + 2 * shape.num_kv_heads * shape.head_dim, e), "o": (e, heads), "gate_up": (2 * i, e)}
    sizes["down"] = e, i

    def drawn(*size: int) -> Any:
        return torch.randn(size, dtype=torch.bfloat16, device="cuda") * DEVIATION

    layers = [{name: drawn(*size) for name, size in sizes.items()} for _ in range(shape.num_layers)]
    norm = torch.ones(e, dtype=torch.bfloat16, device="cuda")
    return {"layers": layers, "head": drawn(shape.vocab_size, e), "norm": norm}


def step_of(torch: Any, shape: ModelConfig, weights: dict[str, Any], case: Case) -> Callable[[], Any]:
    """Return a step of a case: greedy, without rotation, over contiguous keys and values, the last of them written."""
    nn = torch.nn.functional
    e, d, heads, kv, rows = shape.hidden_size, shape.head_dim, shape.num_heads, shape.num_kv_heads, case.rows
    drawn = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    keys, values = ([drawn(rows, kv, case.tokens, d) for _ in weights["layers"]] for _ in range(2))
    norm, begun = weights["norm"], drawn(rows, e)

    def step() -> Any:
        x = begun
        for layer, key, value in zip(weights["layers"], keys, values, strict=True):
            qkv = nn.linear(nn.rms_norm(x, (e,), norm), layer["qkv"])
            q, k, v = (one.unflatten(1, (-1, 1, d)) for one in qkv.split([heads * d, kv * d, kv * d], dim=1))
            key[:, :, -1:], value[:, :, -1:] = k, v
            attended = nn.scaled_dot_product_attention(q, key, value, enable_gqa=True)
            x = x + nn.linear(attended.reshape(rows, heads * d), layer["o"])
            gate, up = nn.linear(nn.rms_norm(x, (e,), norm), layer["gate_up"]).chunk(2, dim=1)
            x = x + nn.linear(nn.silu(gate) * up, layer["down"])
        return nn.linear(nn.rms_norm(x, (e,), norm), weights["head"]).argmax(-1)

    return step


def timed(torch: Any, step: Callable[[], Any], settings: Settings) -> list[float]:
    """Return the milliseconds of a step in every round, each of as many replays of its graph as there are steps."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    rounds = []
    for number in range(settings.rounds + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(settings.steps):
            graph.replay()
        torch.cuda.synchronize()
        if number:  # the first is a warm-up
            rounds.append(1e3 * (time.perf_counter() - began) / settings.steps)
    return rounds
