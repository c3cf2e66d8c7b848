"""The decoders compiled for a model, and the replicas that run them, by the structure of their control."""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from et_jax.decode.config import DecoderConfig, Keep
from et_jax.decode.decoder import Decoder, decoder
from et_jax.decode.plant import Weights
from et_jax.errors import UsageError
from et_jax.models import sharding
from et_jax.models.config import ModelShape
from et_jax.models.model import ModelWeights, device_of, put, put_like
from et_jax.scope import own_settings
from et_jax.serve.config import Control, EngineConfig
from et_jax.serve.loading.sizing import beside, check_measured
from et_jax.serve.metrics import Metrics
from et_jax.serve.programs import executables, preload
from et_jax.serve.queue import Queue
from et_jax.serve.replica import Replica
from et_jax.serve.replicas import Replicas
from et_jax.serve.use import Use, untraced
from et_jax.types import replace

Structure = tuple[Any, frozenset[Keep]]
"""The key of a compiled decoder: a controller's pytree structure, and the extra fields of `DecoderConfig.keep`."""

_MOST_DECODERS = 4  # compiled decoders in the least-recently-used cache


@dataclasses.dataclass(eq=False, repr=False)
class Decoders:
    """The weights of a model, the decoders `compiled` for them so far, and the replicas that are `serving`.

    Threads share them under `lock`. `config` is that of the model's own control, `others` are the shapes of the other
    models that alternate with it or draft for it, and `report` receives the progress of compilations.
    """

    settings: EngineConfig
    config: DecoderConfig
    _weights: Weights | None
    others: tuple[ModelShape, ...]
    metrics: Metrics
    use: Use
    report: Callable[[str], None]
    compiled: dict[Structure, Decoder] = dataclasses.field(default_factory=dict)
    serving: dict[Structure, Replicas] = dataclasses.field(default_factory=dict)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    _scoring: Decoder | None = None
    _configured: tuple[Control | None, frozenset[Keep], DecoderConfig] | None = None

    @property
    def weights(self) -> Weights:
        """The weights of every model. Raises UsageError once they are freed."""
        weights = self._weights
        if weights is None:
            raise self.use.refusal
        return weights

    def free(self) -> None:
        """Free the memory of weights and caches. Waits for running rounds, five seconds at most."""
        serving, self.serving, self.compiled, self._weights = self.serving, {}, {}, None
        self._scoring = None
        released = [replica for replicas in serving.values() for replica in replicas.release()]
        # Takes no lock: the garbage collector may close a generator with a `with model:` in it, in the thread of a
        # round, or at interpreter exit, when no round runs any more and modules are empty.
        left = 5000
        while left and any(replica.under_way for replica in released) and not self.use.elsewhere:
            left -= 1
            time.sleep(0.001)

    def update(self, params: Any) -> None:
        """Replace the model's own weights. Raises UsageError for weights of other shapes, and while requests run."""
        _check_alike(self.weights[0], params)
        with self.lock:
            if any(not replicas.idle for replicas in self.serving.values()):
                raise UsageError(f"{self.settings.name} serves requests; update it when they have ended.")
            self._weights = weights = put_like((params, *self.weights[1:]), self.weights)
            for replicas in self.serving.values():
                replicas.update(weights)

    @untraced
    @own_settings()
    def replicas(self, control: Control | None = None, *, drafts: bool = True) -> Replicas:
        """Return the replicas for a control's structure, created and warmed up (`drafts` too) by the first call."""
        self.use.check()
        own = self.decoder(control)
        wanted = _structure(own.config)
        with self.lock:
            for replicas in self.serving.values():
                replicas.end_abandoned()
            self.serving = serving = {
                structure: replicas
                for structure, replicas in self.serving.items()
                if not replicas.broken and (structure == wanted or not replicas.idle)
            }
            if wanted not in serving:
                queue = Queue()
                each = [self._replica(own, queue, i) for i in range(self.settings.replicas)]
                replicas = Replicas(queue, each, self.use)
                replicas.warm_up(self.report, drafts)
                if control is None:
                    preload.end(self.settings)
                serving[wanted] = replicas
        if self.use.closed:  # by another thread, during warm-up
            self.free()
            raise self.use.refusal
        return serving[wanted]

    def _replica(self, own: Decoder, queue: Queue, number: int) -> Replica:
        """Return replica `number`: replicas take devices, or groups of them, in turn from the weights' own on."""
        weights, mesh = self.weights, own.config.mesh
        if mesh is None:
            home = device_of(weights)
            devices = [home, *(device for device in jax.local_devices() if device != home)]
            weights = put(weights, devices[number % len(devices)])
        elif (there := sharding.mesh_of(mesh.size, number)) != mesh:
            own = executables.cached(decoder(replace(own.config, mesh=there)))
            weights = put(weights, sharding.over(weights, there))
        return Replica(
            weights,
            own,
            queue,
            self.settings,
            metrics=self.metrics,
            # Cached pages lack the logits that the surprisal of the next token requires, tokens that only the small
            # model has prefilled, and a prefill budget's record of the tokens before them.
            cache_prefixes=self.settings.prefix_cache
            and "surprisals" not in own.config.keeps
            and not own.config.lazy
            and own.config.controller.budget is None,
        )

    def decoder(self, control: Control | None = None, keep: frozenset[Keep] = frozenset()) -> Decoder:
        """Return the decoder for a control, from a cache of the most recently used; `keep` is that of DecoderConfig."""
        config = self.configuration(control, keep)
        wanted = _structure(config)
        with self.lock:
            compiled = self.compiled
            found = compiled.pop(wanted, None) or executables.cached(decoder(config))
            compiled[wanted] = found  # now the most recently used
            for old in list(compiled)[:-_MOST_DECODERS]:
                del compiled[old]
        return replace(found, config=config)

    def scoring(self, config: DecoderConfig) -> Decoder:
        """Return the decoder for `score` under a configuration of `serve.scoring`; the largest so far is cached."""
        with self.lock:
            if self._scoring is None or self._scoring.config.num_pages < config.num_pages:
                self._scoring = executables.cached(decoder(config))
            return self._scoring

    def configuration(self, control: Control | None, keep: frozenset[Keep] = frozenset()) -> DecoderConfig:
        """Return the checked decoder configuration under a control; the last is cached for the requests of a call.

        Raises UsageError for a value that is not a control, or is not supported with the model and its settings.
        """
        last = self._configured
        if last is not None and last[0] is control and last[1] == keep:
            return last[2]
        found = self.config.controller if control is None else self.settings.laws_of(control)
        config = beside(self.settings, self.config, found, self.others, keep)
        check_measured(self.settings.name, config)
        self._configured = control, keep, config
        return config


def _check_alike(known: ModelWeights, given: Any) -> None:
    """Raise UsageError unless `given` has the structure, shapes and dtypes of `known`."""
    if jax.tree.structure(known) != jax.tree.structure(given):
        raise UsageError("params is another tree than that of the model; change the leaves of model.params.")
    for (path, one), other in zip(jax.tree.leaves_with_path(known), jax.tree.leaves(given), strict=True):
        wanted, got = (f"{getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}" for x in (one, other))
        if wanted != got:
            raise UsageError(f"params{jax.tree_util.keystr(path)} is {got}; the model has {wanted} there.")


def _structure(config: DecoderConfig) -> Structure:
    return jax.tree.structure(config.controller), config.keep
