"""LoRA adapters in PEFT's file format: low-rank updates of a model's matrices (Hu et al. 2021, arXiv 2106.09685).

A module that computes x W^T computes x (W + s B A)^T with an adapter, where s is alpha / r, or alpha / sqrt(r) if the
adapter is rank-stabilised. The file's tensors name the adapted modules, and adapter_config.json must agree.
"""

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float

from et_jax.errors import UsageError
from et_jax.io.files import expanded
from et_jax.io.json_files import checked, named, read_json
from et_jax.io.schema import AdapterFile
from et_jax.models.checkpoint import sources_of
from et_jax.models.config import ModelConfig
from et_jax.models.encodings import FLOATS
from et_jax.models.families.registry import family_of
from et_jax.models.fingerprint import ADAPTER
from et_jax.models.params import Params, is_stacked
from et_jax.models.sources import Piece, Sources
from et_jax.models.stacks import layers_by_place
from et_jax.models.stored import Stored, headers_of, read_full
from et_jax.models.weights import Adapted, is_weight

CONFIG, WEIGHTS = ADAPTER
_SECONDS, _EXPRESSIONS = 5.0, 16  # the time limit of a regular expression for module names, and their most number
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_STEMS = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
_MERGE = "merge it into its model with PEFT (merge_and_unload) and load that"
_TRAIN = "train it without"
_UNSUPPORTED = {
    "modules_to_save": f"whole modules beside the low-rank ones are not supported; {_TRAIN} modules_to_save",
    "target_parameters": f"adapters of parameters are not supported; {_MERGE}",
    "trainable_token_indices": f"trained tokens are not supported; {_TRAIN} trainable_token_indices",
    "layer_replication": f"replicated layers are not supported; {_TRAIN} layer_replication",
    "alora_invocation_tokens": f"adapters that tokens switch on are not supported; {_TRAIN} alora_invocation_tokens",
    "lora_bias": f"biases are not supported; {_TRAIN} lora_bias",
    "fan_in_fan_out": "matrices stored [in, out] are not supported; take an adapter of a model with linear layers",
}
_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
_HARMLESS = ("use_rslora", "megatron_config", "eva_config")  # names like those of other adapter kinds, but supported
_INITIAL = (True, False, "gaussian", "eva", "orthogonal")  # initialisations that do not change the model's weights


class Factors(NamedTuple):
    """An adapter's update of a matrix, `scale` B A: A is [r, in] and B [out, r]."""

    a: Stored
    b: Stored
    scale: float

    def product(self) -> Float[np.ndarray, "o i"]:
        """Return the update in float32."""
        a, b = (read_full(one).astype(np.float32) for one in (self.a, self.b))
        return np.float32(self.scale) * (b @ a)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter of a model: the `factors` of each adapted tensor, by its name in the model's files."""

    sources: Sources
    factors: Mapping[str, Factors]

    def added(self, leaf: str) -> Float[np.ndarray, "..."] | None:
        """Return the float32 update of a leaf of the model's `Params`, by the leaf's name; None without update."""
        source = self.sources[leaf]
        if not any(piece.tensor in self.factors for piece in source.pieces):
            return None
        return source.read(self._piece, np.float32)

    def low_rank(self, leaf: str) -> tuple[Float[np.ndarray, "r i"], Float[np.ndarray, "o r"]] | None:
        """Return A and `scale` B of a leaf's update; None without update, or for a leaf made of several tensors."""
        piece, *others = self.sources[leaf].pieces
        if others or piece.tensor not in self.factors:
            return None
        a, b, scale = self.factors[piece.tensor]
        rows = read_full(b)[slice(*piece.span)]
        return read_full(a).astype(np.float32), np.float32(scale) * rows.astype(np.float32)

    def _piece(self, piece: Piece) -> Float[np.ndarray, "..."]:
        factors = self.factors.get(piece.tensor)
        return np.zeros(piece.shape_read, np.float32) if factors is None else piece.of(factors.product())


def read_adapter(folder: str | Path, model: ModelConfig) -> Adapter:
    """Return the adapter in a folder, checked against a model; no tensor is read yet.

    Raises UsageError, one sentence, if the adapter is missing, damaged, of an unsupported kind, or of another model.
    """
    folder = expanded(folder)
    if not folder.is_dir():
        raise UsageError(f"The adapter {folder} is no folder; name one that holds {CONFIG} and {WEIGHTS}.")
    if not (folder / CONFIG).exists():
        raise UsageError(f"The adapter {folder} has no {CONFIG}; name a folder that PEFT's save_pretrained wrote.")
    if not (folder / WEIGHTS).exists():
        other = " (adapter_model.bin can run code)" if (folder / "adapter_model.bin").exists() else ""
        raise UsageError(f"The adapter {folder} has no {WEIGHTS}{other}; save it with safe_serialization=True.")
    values = read_json(folder / CONFIG)
    file = checked(values, AdapterFile, folder / CONFIG, "save the adapter again with PEFT")
    _check_kind(folder, file, values)
    sources = sources_of(model)
    modules = {name.removesuffix(".weight"): shape for name, shape in _matrices(sources).items()}
    pairs, stem = _pairs(folder, model, modules)
    adapted = {stem + _inner(module): pair for module, pair in pairs.items()}  # as PEFT saw the modules
    every = {stem + _inner(module): module for module in modules}
    _check_targets(folder, file, adapted, every)
    ranks = _by_pattern(folder, file.rank_pattern or {}, file.r, adapted)
    alphas = _by_pattern(folder, file.alpha_pattern or {}, file.lora_alpha, adapted)
    factors = {}
    for name, (a, b) in adapted.items():
        (outputs, inputs), rank = modules[every[name]], int(ranks[name])
        if (a.shape, b.shape) != ((rank, inputs), (outputs, rank)):
            wrong = f"{list(a.shape)} and {list(b.shape)}, wanted {[rank, inputs]} and {[outputs, rank]}"
            raise UsageError(
                f"The adapter {folder}: A and B of {name} have the shapes {wrong} by {CONFIG} and the model; "
                "take the adapter of this model, with the files of one adapter."
            )
        scale = alphas[name] / (math.sqrt(rank) if file.use_rslora else rank)
        factors[f"{every[name]}.weight"] = Factors(a, b, scale)
    return Adapter(sources=sources, factors=factors)


def bytes_beside(adapters: Collection[Adapter]) -> int:
    """Return an upper bound on the bytes of unmerged adapters: their largest matrices of a layer, in every layer."""
    sizes: dict[str, int] = {}  # of a single adapter in a layer
    kinds = [(re.sub(r"\d+", "*", leaf), leaf) for leaf in next(iter(adapters)).sources] if adapters else []
    for adapter, (kind, leaf) in ((adapter, kind) for adapter in adapters for kind in kinds):
        factors, shape = adapter.factors.get(adapter.sources[leaf].pieces[0].tensor), adapter.sources[leaf].shape
        if factors is not None:
            sizes[kind] = max(sizes.get(kind, 0), factors.a.shape[0] * sum(shape[-2:]))
    return 4 * (len(adapters) + 1) * sum(sizes.get(kind, 0) for kind, _ in kinds)


def beside(params: Params, model: ModelConfig, adapters: Mapping[str, Adapter]) -> Params:
    """Return the weights of a model with unmerged adapters at its matrices, numbered from 1 in order.

    Raises UsageError for an adapter that changes other tensors than matrices of attention, feed-forward or head.
    """
    stacked = is_stacked(params, model)
    alike = layers_by_place(model) if stacked else [range(n, n + 1) for n in range(model.num_layers)]
    places = {"head": ["head"]}  # the leaves of each weight of the tree
    for place, numbers in enumerate(alike):
        places |= {f"layers.{place}.{name}": [f"layers.{n}.{name}" for n in numbers] for name in _MATRICES}
    taken = {leaf for leaves in places.values() for leaf in leaves}
    for name, adapter in adapters.items():
        tensors = {piece.tensor for leaf in taken & adapter.sources.keys() for piece in adapter.sources[leaf].pieces}
        if beyond := sorted(adapter.factors.keys() - tensors):
            raise UsageError(
                f"The adapter {name} changes {beyond[0]}, which is of experts; adapters by name change attention, "
                "feed-forward and head alone: merge it with lora."
            )

    def with_adapters(path: tuple[Any, ...], weight: Any) -> Any:
        leaves = places.get(jax.tree_util.keystr(path, simple=True, separator="."), [])
        pairs = [[one.low_rank(leaf) for one in adapters.values()] for leaf in leaves]
        rank = max((len(pair[0]) for row in pairs for pair in row if pair is not None), default=0)
        if rank == 0:
            return weight
        outputs, inputs = weight.shape[-2:]
        place = weight.array.sharding
        a = np.zeros((len(pairs), len(adapters) + 1, rank, inputs), np.float32)
        b = np.zeros((len(pairs), len(adapters) + 1, outputs, rank), np.float32)
        for layer, row in enumerate(pairs):
            for number, pair in enumerate(row, 1):
                if pair is not None:
                    rank = len(pair[0])
                    a[layer, number, :rank] = pair[0]
                    b[layer, number, :, :rank] = _with_copies(pair[1], outputs, model.head_dim)
        a, b = (a, b) if len(pairs) > 1 else (a[0], b[0])
        if not isinstance(place, NamedSharding):
            return Adapted(base=weight, a=jax.device_put(a), b=jax.device_put(b))
        *_, out, into = (*[None] * (len(weight.shape) - len(place.spec)), *place.spec)
        a = jax.device_put(a, NamedSharding(place.mesh, PartitionSpec(*[None] * (a.ndim - 1), into)))
        b = jax.device_put(b, NamedSharding(place.mesh, PartitionSpec(*[None] * (b.ndim - 2), out, None)))
        return Adapted(base=weight, a=a, b=b)

    return jax.tree.map_with_path(with_adapters, params, is_leaf=is_weight)


def _with_copies(b: Float[np.ndarray, "out r"], outputs: int, head_dim: int) -> Float[np.ndarray, "outputs r"]:
    """Return the factor B of a matrix whose KV heads are repeated to `outputs` rows (`sharding.with_copies`)."""
    heads = b.reshape(-1, head_dim, b.shape[1]) if len(b) < outputs else b
    return np.repeat(heads, outputs // len(b), axis=0).reshape(outputs, -1)


def _check_kind(folder: Path, file: AdapterFile, values: Mapping[str, Any]) -> None:
    """Raise UsageError for adapter kinds and settings that are not supported."""

    def refused(name: str, why: str) -> UsageError:
        return UsageError(f"The adapter {folder} has {name} {named(str(values[name]))}: {why}.")

    if file.peft_type != "LORA":
        raise UsageError(f"The adapter {folder} is of the kind {named(file.peft_type)}; only LORA is supported.")
    if file.bias != "none":
        raise refused("bias", f"trained biases are not supported; {_TRAIN} them, with bias none")
    for name, why in _UNSUPPORTED.items():
        if values.get(name):
            raise refused(name, why)
    for name, value in values.items():
        if value and re.fullmatch(r"use_.*|.*_config", name) and name not in _HARMLESS:
            raise refused(name, f"this kind of low-rank adapter is not supported; {_MERGE}")
    if values.get("init_lora_weights", True) not in _INITIAL:
        convert = "save it with path_initial_model_for_weight_conversion"
        raise refused("init_lora_weights", f"it starts from changed weights of the model; {convert}, or {_MERGE}")


def _matrices(sources: Sources) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that are matrices of a layer, or the head."""
    pieces = [piece for leaf, source in sources.items() if leaf != "embedding" for piece in source.pieces]
    return {piece.tensor: piece.shape for piece in pieces if len(piece.shape) == 2 and piece.tensor.endswith(".weight")}


def _inner(module: str) -> str:
    """Return a module's name from "layers." on."""
    return module[found.start() :] if (found := re.search(r"\blayers\.\d+\.", module)) else module


def _pairs(folder: Path, model: ModelConfig, modules: Iterable[str]) -> tuple[dict[str, tuple[Stored, Stored]], str]:
    """Return A and B of every module of the model that an adapter changes, and the prefix of "layers." in its names.

    Raises UsageError for other tensors, or for modules that the model lacks.
    """
    tensors, family = headers_of([folder / WEIGHTS]), family_of(model)
    own, head = {_inner(module): module for module in modules}, family.head.removesuffix(".weight")
    found: dict[str, dict[str, Stored]] = {}
    stems = set()
    for name, tensor in tensors.items():
        matched = _TENSOR.fullmatch(name)
        if matched is None:
            raise UsageError(
                f"The adapter {folder} holds the tensor {named(name)}, which is no matrix A or B of a linear layer; "
                "save it with save_embedding_layers=False, and train it without embeddings."
            )
        module, inner = matched[1], _inner(matched[1])
        if module == head and head not in own.values():
            raise UsageError(
                f"The adapter {folder} changes {head}, which this model ties to its embedding; "
                f"{_TRAIN} {head} among its target_modules."
            )
        stem = module.removesuffix(inner)
        if inner not in own or stem not in _STEMS:
            raise UsageError(
                f"The adapter {folder} changes {named(module)}, which this {model.architecture} model has not; "
                "take the adapter of this model."
            )
        if tensor.stored not in FLOATS:
            raise UsageError(f"The adapter {folder} stores {named(name)} as {tensor.stored}; save it as floats.")
        stems |= {stem} if inner != module else set()
        found.setdefault(own[inner], {})[matched[2]] = tensor
    if not found:
        raise UsageError(f"The adapter {folder} holds no matrix; train it, and save it again.")
    if len(stems) > 1:
        raise UsageError(f"The adapter {folder} names layers in two ways; save it again from one model.")
    for module, pair in found.items():
        if len(pair) < 2:
            raise UsageError(f"The adapter {folder} has A or B alone of {module}; save it again.")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}, next(iter(stems), "model.")


def _check_targets(folder: Path, file: AdapterFile, adapted: Iterable[str], every: Iterable[str]) -> None:
    """Raise UsageError unless the modules that an adapter changes are those that its configuration targets."""
    targets = file.target_modules
    if targets == "all-linear":
        return
    wanted = _matched(folder, targets, every)
    if isinstance(targets, list):
        if lost := [target for target in targets if not _matched(folder, [target], every)]:
            raise UsageError(
                f"The adapter {folder} targets the module {named(lost[0])}, which this model has not; "
                "take the adapter of this model."
            )
        wanted = {name for name in wanted if _in_layers(folder, file, name)}
    wanted -= _matched(folder, file.exclude_modules or [], every)
    if differing := sorted(wanted ^ set(adapted)):
        has = "has no matrices of" if differing[0] in wanted else "has matrices of"
        raise UsageError(
            f"The adapter {folder} {has} {differing[0]}, unlike target_modules of its {CONFIG}; "
            "use the two files of one adapter, with its own model."
        )


def _in_layers(folder: Path, file: AdapterFile, name: str) -> bool:
    """Return whether a module is in an adapted layer, by PEFT's numbering."""
    layers, pattern = file.layers_to_transform, file.layers_pattern
    if layers is None or layers == []:
        return True
    if pattern not in (None, "", [], "layers", ["layers"]):
        raise UsageError(f"The adapter {folder} has another layers_pattern than layers; save it with None.")
    found = re.match(r".*\.layers\.(\d+)\." if pattern else r".*\.[^.]*\.(\d+)\.", name)
    return found is not None and int(found[1]) in ([layers] if isinstance(layers, int) else layers)


def _by_pattern(folder: Path, patterns: Mapping[str, Any], usual: int | float, names: Iterable[str]) -> dict[str, Any]:
    """Return a number for every module: that of the first pattern that matches its name, otherwise `usual`."""
    found = dict.fromkeys(names, usual)
    spelled = {key: [key] if re.fullmatch(r"[\w.-]+", key) else rf"(.*\.)?({key})" for key in patterns}
    if sum(isinstance(one, str) for one in spelled.values()) > _EXPRESSIONS:
        raise UsageError(
            f"The adapter {folder} has over {_EXPRESSIONS} expressions for modules; name these in {CONFIG}."
        )
    for key in reversed([*patterns]):
        found |= dict.fromkeys(_matched(folder, spelled[key], found), patterns[key])
    return found


def _matched(folder: Path, pattern: str | list[str], names: Iterable[str]) -> set[str]:
    """Return the names that a regular expression matches in full, or that equal or end in a listed name.

    An untrusted expression may never terminate, so it runs in a separate process with a time limit.
    """
    names = list(names)
    if isinstance(pattern, list):
        return {name for name in names if any(f".{name}".endswith(f".{end}") for end in pattern)}
    program = (
        "import json, re, sys; p, n = json.load(sys.stdin); print(json.dumps([a for a in n if re.fullmatch(p, a)]))"
    )
    command = [sys.executable, "-I", "-c", program]
    try:
        done = subprocess.run(
            command, input=json.dumps([pattern, names]), capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise UsageError(
            f"The adapter {folder} names modules by {named(pattern)}, which is no expression or takes over "
            f"{_SECONDS:g} s; list the modules in {CONFIG}."
        ) from error
    return set(json.loads(done.stdout))
