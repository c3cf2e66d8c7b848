"""Tokens per second of et_jax and Hugging Face transformers: same weights, same machine, turn by turn.

    python scripts/bench_peers.py --peer-python OTHER_ENVIRONMENT/bin/python

Two workers, each in its own environment, take turns generating: greedy, end tokens ignored, the same prompts (token
ids), the same number of new tokens. et_jax runs what `Model.generate` runs, text and trace of every token included;
transformers runs `generate` as it comes, with its default (dynamic) KV cache, not compiled, on as many threads as
there are cores. Each side is first tried in float32 and bfloat16 and keeps the dtype in which it is faster. The ratio
is taken pair by pair. Nothing is asserted about time; greedy tokens of both sides must agree in float32 where they
begin, unless et_jax holds its weights in 8 bits (`--quantize`).
"""

import argparse
import importlib
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DTYPES = ("float32", "bfloat16")
SIDES = ("et_jax", "transformers")
TRIALS = 3  # runs by which a side's dtype is chosen
PAUSE = 0.3  # seconds between turns, in which the threads of the side that ran go to sleep


class EtJax:
    """The worker of this package: what a caller of `Model.generate` waits for."""

    def versions(self) -> dict[str, str]:
        import jax

        device = jax.devices()[0]
        versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
        return versions | {"device": f"{device.platform} {device.device_kind}"}

    def load(self, model: str, dtype: str, batch: int, quantize: str | None) -> None:
        from et_jax.serve.engine import load

        self.model = None  # before the next one is read: both may not fit
        self.model = load(model, dtype=dtype, max_num_seqs=batch, quantize=quantize)

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        from et_jax.serve.requests import SamplingParams

        assert self.model is not None
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        ids: list[list[int]] = [[] for _ in prompts]
        began, first = time.perf_counter(), 0.0
        for event in self.model.stream(prompts, params):
            first = first or time.perf_counter()
            if event.completion:
                ids[event.prompt_index] = list(event.completion.token_ids)
        return timed(began, first, ids)


class Transformers:
    """The peer's worker."""

    def versions(self) -> dict[str, str]:
        self.torch, self.transformers = importlib.import_module("torch"), importlib.import_module("transformers")
        self.torch.set_num_threads(num_cores())
        self.transformers.utils.logging.disable_progress_bar()
        self.device = "cuda" if self.torch.cuda.is_available() else "cpu"
        return {
            "transformers": self.transformers.__version__,
            "torch": self.torch.__version__,
            "device": f"{self.device}, {self.torch.get_num_threads()} threads",
        }

    def load(self, model: str, dtype: str, batch: int) -> None:
        self.model = None
        loader = self.transformers.AutoModelForCausalLM
        self.model = loader.from_pretrained(model, dtype=getattr(self.torch, dtype)).to(self.device).eval()

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        assert self.model is not None
        settings = self.transformers.GenerationConfig(
            max_new_tokens=tokens, do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0
        )
        times: list[float] = []

        def note(*_: Any, **__: Any) -> bool:
            times.append(time.perf_counter())
            return False

        began = time.perf_counter()
        inputs = self.torch.tensor(prompts, device=self.device)
        output = self.model.generate(
            inputs,
            attention_mask=self.torch.ones_like(inputs),
            generation_config=settings,
            stopping_criteria=self.transformers.StoppingCriteriaList([note]),
        )
        return timed(began, times[0], output[:, inputs.shape[1] :].tolist())


def timed(began: float, first: float, ids: list[list[int]]) -> dict[str, Any]:
    """Return the seconds of a run to its end and to its first token, and the tokens."""
    return {"seconds": time.perf_counter() - began, "first": first - began, "ids": ids}


def serve(side: str) -> None:
    """Answer requests, one JSON object a line. Whatever a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = {"et_jax": EtJax, "transformers": Transformers}[side]()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:  # told to the one who asked
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    """A worker process, seen by the one who asks."""

    def __init__(self, side: str, python: str) -> None:
        self.side = side
        self._process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), "--worker", side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def ask(self, do: str, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do} | request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"ended with code {self._process.wait()}"}
        if isinstance(answer, dict) and "error" in answer:
            sys.exit(f"{self.side}: {answer['error']}")
        return answer

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Case:
    """One model at one batch size."""

    def __init__(self, model: str, batch: int, args: argparse.Namespace) -> None:
        self.model, self.batch, self.args = model, batch, args
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        self.vocab_size = config["vocab_size"]

    def prompts(self, seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        return [draw.choices(range(self.vocab_size), k=self.args.prompt_tokens) for _ in range(self.batch)]

    def ready(self, worker: Worker, dtype: str) -> dict[str, Any]:
        """Load the model, run it once (compilers and caches), and return that run."""
        own = {"quantize": self.args.quantize} if worker.side == "et_jax" else {}
        worker.ask("load", model=self.model, dtype=dtype, batch=self.batch, **own)
        return self.turn(worker, seed=0)

    def turn(self, worker: Worker, seed: int) -> dict[str, Any]:
        time.sleep(PAUSE)
        return worker.ask("generate", prompts=self.prompts(seed), tokens=self.args.tokens)

    def tokens_per_second(self, run: dict[str, Any]) -> float:
        return self.batch * self.args.tokens / run["seconds"]

    def steps_per_second(self, run: dict[str, Any]) -> float:
        """Decode steps alone: from the first token on."""
        return (self.args.tokens - 1) / (run["seconds"] - run["first"])

    def run(self, workers: list[Worker]) -> dict[str, Any]:
        """Choose each side's dtype, let the sides take turns, and return what was seen."""
        trials: dict[str, dict[str, float]] = {worker.side: {} for worker in workers}
        ids: dict[str, list[list[int]]] = {}
        for dtype in DTYPES:
            for worker in workers:
                warm = self.ready(worker, dtype)
                rates = [self.tokens_per_second(self.turn(worker, seed)) for seed in range(TRIALS)]
                trials[worker.side][dtype] = statistics.median(rates)
                if dtype == "float32":
                    ids[worker.side] = warm["ids"]
        chosen = {side: max(rates, key=lambda dtype: rates[dtype]) for side, rates in trials.items()}
        for worker in workers:
            if chosen[worker.side] != DTYPES[-1]:
                self.ready(worker, chosen[worker.side])
        rounds = []
        for seed in range(self.args.rounds):
            runs = {worker.side: self.turn(worker, TRIALS + seed) for worker in workers}
            rounds.append({side: {name: run[name] for name in ("seconds", "first")} for side, run in runs.items()})
        return self.summary(trials, chosen, rounds) | {"agreement": agreement(*(ids[side] for side in SIDES))}

    def summary(self, trials: dict, chosen: dict[str, str], rounds: list[dict[str, dict]]) -> dict[str, Any]:
        sides = {}
        for side in SIDES:
            rates = [self.tokens_per_second(each[side]) for each in rounds]
            sides[side] = {
                "dtype": chosen[side],
                "tokens_per_second": statistics.median(rates),
                "slowest": min(rates),
                "fastest": max(rates),
                "steps_per_second": statistics.median(self.steps_per_second(each[side]) for each in rounds),
                "first_token_seconds": statistics.median(each[side]["first"] for each in rounds),
                "trials": trials[side],
            }
        ours, theirs = SIDES
        ratios = [each[theirs]["seconds"] / each[ours]["seconds"] for each in rounds]
        steps = [self.steps_per_second(each[ours]) / self.steps_per_second(each[theirs]) for each in rounds]
        return {
            "model": Path(self.model).name,
            "batch": self.batch,
            "sides": sides,
            "ratio": statistics.median(ratios),
            "ratio_lowest": min(ratios),
            "ratio_highest": max(ratios),
            "steps_ratio": statistics.median(steps),
            "rounds": rounds,
        }


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, int]:
    """Return how many tokens agree from the start: in the worst row, in all rows together, and of how many."""
    equal = []
    for a, b in zip(ours, theirs, strict=True):
        differs = [x != y for x, y in zip(a, b, strict=True)]
        equal.append(differs.index(True) if True in differs else len(differs))
    return {"least": min(equal), "together": sum(equal), "tokens": sum(map(len, ours))}


def built_in_model(folder: Path) -> str:
    """Return the folder of the random model, written on first use, with a tokenizer of one word per id."""
    folder = folder / "random-smollm-135m"
    if (folder / "tokenizer.json").exists():
        return str(folder)
    import jax
    import jax.numpy as jnp
    import tokenizers

    from et_jax.evidence.shapes import SMOLLM_135M
    from et_jax.models.checkpoint import write_hugging_face
    from et_jax.models.transformer import initialise

    write_hugging_face(folder, SMOLLM_135M, initialise(SMOLLM_135M, jax.random.key(0), jnp.bfloat16))
    words = {f"w{id}": id for id in range(SMOLLM_135M.vocab_size)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return str(folder)


def num_cores() -> int:
    """Return the cores this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """Return what the figures were measured on, and how busy it was."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    return {
        "cpu": found[1] if found else platform.processor(),
        "cores": num_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": os.getloadavg()[0],
    }


def refuse_without_peer(python: str) -> None:
    """End with one sentence unless `python` is a Python that has the peer."""
    try:
        found = subprocess.run([python, "-c", "import torch, transformers"], capture_output=True, text=True)
    except OSError as error:
        sys.exit(f"{python} cannot be run ({error.strerror}); name a Python with --peer-python.")
    if found.returncode:
        reason = found.stderr.strip().splitlines()[-1:] or ["no reason given"]
        sys.exit(
            f"{python} lacks torch or transformers ({reason[0]}); install both there: pip install torch transformers."
        )


def lines(case: dict[str, Any]) -> list[str]:
    """Return the rows of the table that show one case."""
    rows = []
    for side in SIDES:
        s = case["sides"][side]
        tried = ", ".join(f"{dtype} {rate:.1f}" for dtype, rate in s["trials"].items())
        spread = f"{s['slowest']:.1f} to {s['fastest']:.1f}"
        rows.append(
            f"{case['model']:22} {case['batch']:5}  {side:12} {s['dtype']:9} {s['tokens_per_second']:9.1f} "
            f"{spread:>18} {s['steps_per_second']:8.1f} {s['first_token_seconds']:8.3f}   tried: {tried}"
        )
    agreed, percent = case["agreement"], 100 * case["agreement"]["together"] / case["agreement"]["tokens"]
    rows.append(
        f"{'':28}  ratio {case['ratio']:.2f} (pairs {case['ratio_lowest']:.2f} to {case['ratio_highest']:.2f}), "
        f"decode steps alone {case['steps_ratio']:.2f}; float32 tokens agree from the start: {percent:.0f}%, "
        f"at least {agreed['least']} a row"
    )
    return rows


def main() -> int:
    """Measure every case, print the table, write the figures, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="a Python that has torch and transformers")
    parser.add_argument("--model", action="append", help="folder of a model; repeatable (default: random, of 135M)")
    parser.add_argument("--quantize", choices=["int8"], help="hold et_jax's weights in 8 bits; the peer's stay floats")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="sequences at once (default 1 16)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each sequence (default 64)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens of each prompt (default 32)")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of runs for each case (default 7)")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/et_jax/bench"), help="where the random model lies")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/peers-MACHINE.json")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args.worker)
        return 0
    if args.tokens < 2 or args.rounds < 1 or min(args.batch) < 1 or args.prompt_tokens < 1:
        parser.error("--tokens wants at least 2, --rounds, --batch and --prompt-tokens at least 1")
    if not args.peer_python:
        parser.error("--peer-python is needed: a Python that has torch and transformers")
    refuse_without_peer(args.peer_python)
    models = args.model or [built_in_model(args.cache.expanduser())]
    if absent := [model for model in models if not (Path(model) / "config.json").exists()]:
        parser.error(f"{absent[0]} holds no config.json; name the folder of a Hugging Face model")

    workers = [Worker("et_jax", sys.executable), Worker("transformers", args.peer_python)]
    report = {"script": Path(__file__).name, "machine": machine()}
    report["versions"] = {worker.side: worker.ask("versions") for worker in workers}
    report["arguments"] = {
        name: getattr(args, name) for name in ("batch", "tokens", "prompt_tokens", "rounds", "quantize")
    }
    print(json.dumps(report["machine"]), json.dumps(report["versions"]), sep="\n")
    print(
        f"{'model':22} {'batch':>5}  {'side':12} {'dtype':9} {'tokens/s':>9} {'slowest, fastest':>18} {'steps/s':>8} "
        f"{'first s':>8}"
    )
    report["cases"] = []
    for model in models:
        for batch in args.batch:
            case = Case(model, batch, args).run(workers)
            report["cases"].append(case)
            print(*lines(case), sep="\n", flush=True)
    for worker in workers:
        worker.end()
    slug = f"{report['machine']['cpu']} {num_cores()} cores {args.quantize or ''}".lower()
    slug = re.sub(r"[^a-z0-9]+", "-", slug).strip("-")
    output = args.output or ROOT / f"benchmarks/results/peers-{slug}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written to {output}")
    if args.quantize is None and any(case["agreement"]["least"] == 0 for case in report["cases"]):
        print("The two sides disagree on a first token: they do not compute the same model.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
