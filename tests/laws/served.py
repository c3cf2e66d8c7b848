"""A row of the table as it is served: its model, requests of every kind, and what all laws compare."""

import jax
import reopened
from capabilities import Capability
from small_model import same_bits

from et_jax.decode.request import request
from et_jax.decode.sampling.settings import plain
from et_jax.serve.completions import Completion
from et_jax.serve.device import Device
from et_jax.serve.engine import Model
from et_jax.serve.requests import GenerationRequest, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["north", "south"]}, "note": {"type": "string", "maxLength": 24}},
    "required": ["name", "note"],
    "additionalProperties": False,
}


class Served:
    """A row of the table with its model, loaded and compiled once, and requests of every kind.

    `alone` is what is written for each request by itself, nothing kept from one to the next.
    """

    def __init__(self, capability: Capability) -> None:
        self.capability, self.model = capability, capability.opened()
        self.tokens = self.model.tokenizer.encode(reopened.SENTENCE * 4)
        self.adapters = (None, *(self.model.settings.adapters or ()))
        self.requests = self._asked()
        quiet = self.anew(prefix_cache=False)
        self.alone = [one for request in self.requests for one in quiet.generate(request)]

    def anew(self, **settings) -> Model:
        """The same programs, with another host around them that has served nothing."""
        return reopened.reopened(self.model, **settings)

    def device(self) -> Device:
        """What a replica that has served nothing does on its device."""
        [replica] = self.anew().replicas().replicas
        return replica.device

    def _asked(self) -> list[GenerationRequest]:
        """Prompts around the borders of pages and chunks, some of which begin alike, and settings of every kind."""
        lengths = [1, 17, 18, 33, 32, 41, 50, 5, 12]
        kinds = [
            {"temperature": 0.0},
            {"temperature": 0.8, "top_p": 0.9},
            {"temperature": 0.7, "frequency_penalty": -2.0},  # goes round in circles, as drafts by lookup like it
            {"top_k": 20, "logprobs": 3, "n": 2, "typical_p": 0.8},
            {"temperature": 1.3, "min_p": 0.05, "stop": ("the", ". ")},
            {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 20},
            {"presence_penalty": 0.5, "temperature": 0.9, "ignore_eos": True, "top_h": 0.8, "top_n_sigma": 3.0},
            {"temperature": 0.0, "frequency_penalty": -1.0, "logit_bias": {260: 3.0}, "bad_words": ("the", "it was")},
            {"json_schema": SCHEMA, "top_p": 0.9, "presence_penalty": 0.1},
        ]
        return [
            GenerationRequest(
                prompt=tuple(self.tokens[16 * (number % 2) :][:length]),
                params=SamplingParams(**{"max_tokens": 18 + 3 * number, "seed": number} | kind),
                adapter=self.adapters[number % len(self.adapters)],
            )
            for number, (length, kind) in enumerate(zip(lengths, kinds, strict=True))
        ]


def begun(served, slots: int = 2) -> Device:
    """A greedy sequence and others that are sampled, in the first slots, some steps on their way."""
    device = served.device()
    chunk = device.config.chunk
    for slot, length in enumerate((11, 19, 8, 15)[:slots]):
        prompt = served.tokens[slot : slot + length]
        for at in range(0, length - 1, chunk):
            end = min(at + chunk, length - 1)
            device.prefill([(slot, prompt[at:end])], ends=[slot] if end == length - 1 else [])
        device.insert(slot, request(device.config, prompt, limit=30, seed=slot, temperature=float(slot)))
    device.decode(5, device.config.batch, until_end=False)
    assert all(granted.all() for granted in device.promises)
    return device


def bits(done: list[Completion]) -> list:
    """Every bit of texts and traces but what sequences of one batch share: what a token is charged."""
    return [reopened.bits(one, flops=0.0) for one in done]


def assert_balanced(model: Model) -> None:
    """Nothing runs or waits, what was asked for is forgotten, and every page is back once no prefix is kept."""
    for replica in model.replicas().replicas:
        assert replica.idle and not replica.broken
        state = replica.device.state
        assert not state.active.any() and not state.length.any()
        assert same_bits(state.sampling, plain(state.active.shape))
        table = jax.device_get(replica.device.state.table)
        assert not table.num_blocks.any() and (table.references > 0).sum() == replica.pool.num_cached
    reopened.assert_balanced(model)
