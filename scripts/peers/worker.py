"""A process that runs one engine: requests come in on standard input, answers go out, one JSON object a line.

    PYTHON scripts/peers/worker.py ENGINE    (PYTHON's environment has the engine)

An engine returns its `versions`; it has `load` put the weights of a folder, or of a GGUF file, in a form, for so many
sequences of at most so many tokens; `generate` continues prompts of one length, greedily on all cores, end tokens
ignored.
"""

import importlib
import json
import os
import sys
import time
from typing import Any


class EtJax:
    """The package itself: what a caller of `Model.stream` waits for, text and trace of every token included."""

    def versions(self) -> dict[str, str]:
        jax: Any = importlib.import_module("jax")
        return {"jax": jax.__version__, "device": jax.devices()[0].device_kind}

    def load(self, model: str, form: str, batch: int, length: int, **settings: Any) -> None:
        package: Any = importlib.import_module("et_jax")
        self.model: Any = None  # before the next one is read: both may not fit
        settings |= {"dtype": "bfloat16", "quantize": form} if form == "int8" else {"dtype": form}
        self.model = package.load(model, max_num_seqs=batch, **settings)

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        ids: list[list[int]] = [[] for _ in prompts]
        began, first = time.perf_counter(), 0.0
        for event in self.model.stream(prompts, max_tokens=tokens, temperature=0.0, ignore_eos=True):
            first = first or time.perf_counter()
            if event.completion:
                ids[event.prompt_index] = list(event.completion.token_ids)
        return timed(began, first, ids)


class LlamaCpp:
    """llama.cpp through llama-cpp-python's bindings of its C functions: all sequences in one batch."""

    def versions(self) -> dict[str, str]:
        self.lib: Any = importlib.import_module("llama_cpp")
        self.numpy: Any = importlib.import_module("numpy")
        self.quiet = self.lib.llama_log_callback(lambda *_: None)  # the library keeps no reference
        self.lib.llama_log_set(self.quiet, None)
        self.lib.llama_backend_init()
        self.model: Any = None
        self.context: Any = None
        return {"llama-cpp-python": self.lib.__version__, "built with": self.lib.llama_print_system_info().decode()}

    def load(self, model: str, form: str, batch: int, length: int) -> None:
        lib = self.lib
        if self.context is not None:
            lib.llama_free(self.context)
            lib.llama_model_free(self.model)
        settings = lib.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(model.encode(), settings)
        context = lib.llama_context_default_params()
        context.n_seq_max = batch
        context.n_ctx = batch * -(-length // 256) * 256
        context.n_batch = context.n_ctx
        context.n_threads = context.n_threads_batch = num_cores()
        if form == "float32":
            context.type_k = context.type_v = lib.GGML_TYPE_F32
            context.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED  # which computes in float16
        self.context = lib.llama_init_from_model(self.model, context)
        if self.context is None:
            raise RuntimeError(f"llama.cpp has no room for {batch} sequences of {length} tokens")
        self.vocabulary = lib.llama_model_get_vocab(self.model)
        self.vocab_size = lib.llama_vocab_n_tokens(self.vocabulary)
        self.batch = lib.llama_batch_init(batch * length, 0, 1)

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        lib, length = self.lib, len(prompts[0])
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        began = time.perf_counter()
        for row, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                self._put(row * length + position, token, position, row, position == length - 1)
        newest = self._decoded(len(prompts) * length, len(prompts))
        first, ids = time.perf_counter(), [[token] for token in newest]
        for position in range(length, length + tokens - 1):
            for row, token in enumerate(newest):
                self._put(row, token, position, row, True)
            newest = self._decoded(len(prompts), len(prompts))
            for own, token in zip(ids, newest, strict=True):
                own.append(token)
        return timed(began, first, ids)

    def tokens(self, texts: list[str]) -> dict[str, Any]:
        """Return the ids of texts, with no special token."""
        ids = []
        for text in texts:
            content = text.encode()
            room = (self.lib.llama_token * (len(content) + 8))()
            count = self.lib.llama_tokenize(self.vocabulary, content, len(content), room, len(room), False, False)
            ids.append(list(room[:count]))
        return {"ids": ids}

    def logits(self, prompt: list[int], file: str) -> None:
        """Write the logits after every token of a prompt to a NumPy file."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        for position, token in enumerate(prompt):
            self._put(position, token, position, 0, True)
        self.numpy.save(file, self._logits(len(prompt), len(prompt)))

    def _put(self, index: int, token: int, position: int, row: int, asked: bool) -> None:
        batch = self.batch
        batch.token[index], batch.pos[index], batch.logits[index] = token, position, asked
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, row

    def _decoded(self, size: int, rows: int) -> list[int]:
        """Decode the first `size` tokens of the batch, and return the likeliest token after each one asked for."""
        return self._logits(size, rows).argmax(axis=1).tolist()

    def _logits(self, size: int, rows: int) -> Any:
        self.batch.n_tokens = size
        if code := self.lib.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode answered {code}")
        logits = self.lib.llama_get_logits(self.context)
        return self.numpy.ctypeslib.as_array(logits, shape=(rows, self.vocab_size))


class Transformers:
    """Hugging Face transformers: `generate` as it comes, with its dynamic cache, not compiled."""

    def versions(self) -> dict[str, str]:
        self.torch: Any = importlib.import_module("torch")
        self.transformers: Any = importlib.import_module("transformers")
        self.torch.set_num_threads(num_cores())
        self.transformers.utils.logging.disable_progress_bar()
        threads = f"{self.torch.get_num_threads()} threads"
        return {"transformers": self.transformers.__version__, "torch": self.torch.__version__, "device": threads}

    def load(self, model: str, form: str, batch: int, length: int) -> None:
        self.model: Any = None
        loader = self.transformers.AutoModelForCausalLM
        self.model = loader.from_pretrained(model, dtype=getattr(self.torch, form)).eval()

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        greedy = {"do_sample": False, "use_cache": True, "eos_token_id": None, "pad_token_id": 0}
        settings = self.transformers.GenerationConfig(max_new_tokens=tokens, **greedy)
        times: list[float] = []

        def record(*_: Any, **__: Any) -> bool:
            times.append(time.perf_counter())
            return False

        began = time.perf_counter()
        inputs, criteria = self.torch.tensor(prompts), self.transformers.StoppingCriteriaList([record])
        given = {"attention_mask": self.torch.ones_like(inputs), "generation_config": settings}
        output = self.model.generate(inputs, stopping_criteria=criteria, **given)
        return timed(began, times[0], output[:, inputs.shape[1] :].tolist())


ENGINES: dict[str, Any] = {"et_jax": EtJax, "llama.cpp": LlamaCpp, "transformers": Transformers}


def timed(began: float, first: float, ids: list[list[int]]) -> dict[str, Any]:
    """Return the seconds of a run to its end and to its first token, and the tokens."""
    return {"seconds": time.perf_counter() - began, "first": first - began, "ids": ids}


def num_cores() -> int:
    """Return the cores this process may use."""
    return len(os.sched_getaffinity(0))


def main() -> None:
    """Answer requests until no more come. Whatever a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    engine = ENGINES[sys.argv[1]]()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(engine, request.pop("do"))(**request) or {}
        except Exception as error:  # the client raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
