"""Does each temperature law hold its target entropy? Free-running text, its tempered entropy against the target.

    python scripts/measure_temperature.py --case bundled novels.tar.xz --case FOLDER stories.txt --plot

Every law continues the same prompts, the first tokens of passages spaced over the text, with the same seeds; end
tokens are not heeded. The tempered entropy is that of the distribution a token was drawn from, before truncation. For
Mirostat the target is a surprisal, and what it holds is the mean surprisal of the tokens drawn. `fixed` and `edt` have
no target and run once. The guards count a thermostat's bounds and its gain V >= 2 from the first token on. Below each
table stand the distinct 3-grams of the text itself.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from et_jax.control import guards, temperature, temperature_rules
from et_jax.control.base import Law, TemperatureRule
from et_jax.control.controller import Controller
from et_jax.decode.request import request
from et_jax.evidence import tables
from et_jax.evidence.figures import FIGURES, pyplot, save
from et_jax.serve import chunks
from et_jax.serve.engine import Model, load
from scripts.measuring import arguments
from scripts.measuring.results import write
from scripts.measuring.text import rows

LOW, HIGH = 0.1, 2.0  # clip of every law and rule
PROMPT = 17  # tokens
DRAWN = ("fixed", "thermostat 0.05", "solve")  # in the figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A law or a rule to run. `gain` is a thermostat's; `bounds` are where its temperature is clipped."""

    name: str
    law: Law = dataclasses.field(default_factory=temperature.Fixed)
    rule: TemperatureRule | None = None
    gain: float | None = None
    bounds: tuple[float, float] | None = None


def untargeted() -> list[Case]:
    """Return the cases that know no target."""
    return [Case(name="fixed"), Case(name="edt 1.0", rule=temperature_rules.EDT(1.0))]


def targeted(target: float, gains: dict[str, float]) -> list[Case]:
    """Return the cases that aim at `target` nats, with a thermostat for each of `gains`."""
    clip = {"low": LOW, "high": HIGH}
    thermostats = [
        Case(name=name, law=temperature.Thermostat(target, gain, **clip), gain=gain, bounds=(LOW, HIGH))
        for name, gain in gains.items()
    ]
    solve = temperature_rules.Solve(target, **clip)
    return [
        *thermostats,
        Case(name="damped thermostat", law=temperature.DampedThermostat(target, **clip), bounds=(LOW, HIGH)),
        Case(name="mirostat2", law=temperature.Mirostat2(target)),
        Case(name="newton", rule=temperature_rules.Newton(target, **clip), bounds=(LOW, HIGH)),
        Case(name="solve", rule=solve, bounds=(LOW, HIGH)),
        Case(name="cool only, solve", rule=temperature_rules.CoolOnly(solve), bounds=(LOW, 1.0)),
    ]


def controller(case: Case) -> Controller:
    """Return the controller of a case, its law under the guards that count."""
    law = case.law
    if case.bounds is not None:
        law = guards.Saturation(law, "temperature", *case.bounds)
    if case.gain is not None:
        law = guards.Stability(law, case.gain)
    return Controller(law=law, temperature_rule=case.rule)


def greatest_varentropy(num_tokens: int) -> float:
    """Return the greatest varentropy of any distribution, in nats^2: one token against the rest even."""
    p = np.linspace(0.0, 1.0, 100_001)[1:-1]
    return float((p * (1 - p) * np.log(p * (num_tokens - 1) / (1 - p)) ** 2).max())


def run(model: Model, case: Case, prompts: np.ndarray, num_tokens: int, seed: int) -> dict[str, Any]:
    """Return what each token of each prompt's continuation showed, "t r", and the guards' counts by name."""
    decoder = model.decoder(controller(case))
    state = decoder.empty()
    for slot, prompt in enumerate(prompts):
        for call in chunks.calls(decoder.config, slot, prompt[:-1].tolist()):
            state, _ = decoder.prefill(model.weights, state, *call)
        asked = request(decoder.config, prompt.tolist(), limit=num_tokens, temperature=1.0, seed=seed, index=slot)
        state = decoder.insert(state, slot, asked)
    bursts = []
    for _ in range(-(-num_tokens // decoder.config.max_steps)):
        state, outputs, ran = decoder.decode(model.weights, state, decoder.config.max_steps)
        bursts.append(jax.tree.map(lambda x, ran=int(ran): np.asarray(x)[:ran, 0], outputs))
    output = jax.tree.map(lambda *leaves: np.concatenate(leaves), *bursts)
    names = ("tempered_entropy", "tempered_varentropy", "truncated_entropy", "surprisal")
    shown = {name: getattr(output.signals, name) for name in names}
    counts = {name: float(np.mean(rate)) for name, rate in guards.rates(state.control).items()}
    return shown | {"token": output.token, "temperature": output.temperature, "rates": counts}


def summary(case: Case, shown: dict[str, Any], target: float, burn_in: int) -> dict[str, Any]:
    """Return a case's figures against a target, from the tokens after the first `burn_in`."""
    late = {name: value[burn_in:] for name, value in shown.items() if name != "rates"}
    heat = late["temperature"]
    stuck = shown["rates"].get("temperature_saturation")
    if case.rule is not None and case.bounds is not None:  # no law stores the temperature that a rule decides
        low, high = case.bounds
        stuck = float(np.mean((heat <= low * 1.001) | (heat >= high * 0.999)))
    return {
        "law": case.name,
        "gain": case.gain,
        "mean_entropy": float(late["tempered_entropy"].mean()),
        "mean_absolute_deviation": float(np.abs(late["tempered_entropy"] - target).mean()),
        "mean_surprisal": float(late["surprisal"].mean()),
        "mean_truncated_entropy": float(late["truncated_entropy"].mean()),
        "mean_varentropy": float(late["tempered_varentropy"].mean()),
        "mean_temperature": float(heat.mean()),
        "temperature_range": [float(heat.min()), float(heat.max())],
        "at_bound": stuck,
        "gain_times_varentropy_at_least_2": shown["rates"].get("stability"),
        "distinct_3_grams": distinct_3_grams(shown["token"].T),
    }


def distinct_3_grams(tokens: np.ndarray) -> float:
    """Return the share of a row's 3-grams that differ from all before them, the mean over rows "r t"."""
    grams = [list(zip(row, row[1:], row[2:], strict=False)) for row in tokens.tolist()]
    return float(np.mean([len(set(row)) / len(row) for row in grams]))


def measure(name: str, text: Path, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return one model's figures, and what the cases of the figure showed at its target."""
    model = load(name, dtype="float32", max_num_seqs=args.prompts)
    passages = rows(model, text, args.prompts, PROMPT + args.tokens)
    prompts = passages[:, :PROMPT]
    free = [(case, run(model, case, prompts, args.tokens, args.seed)) for case in untargeted()]
    mean_varentropy = float(free[0][1]["tempered_varentropy"][args.burn_in :].mean())
    greatest = greatest_varentropy(model.config.vocab_size)
    gains = {
        "thermostat 0.05": 0.05,
        "thermostat 2/greatest V": 2.0 / greatest,
        "thermostat 2/mean V": 2.0 / mean_varentropy,
    }
    results, drawn = [], {}
    for target in args.targets:
        cases = [*free, *((c, run(model, c, prompts, args.tokens, args.seed)) for c in targeted(target, gains))]
        results.append({"target": target, "laws": [summary(*case, target, args.burn_in) for case in cases]})
        if target == args.plot_target:
            drawn = {case.name: shown for case, shown in cases if case.name in DRAWN}
    figures = {
        "model": Path(name).name,
        "vocabulary": model.config.vocab_size,
        "text": text.name,
        "mean_varentropy_at_1": mean_varentropy,
        "greatest_varentropy": greatest,
        "distinct_3_grams_of_the_text": distinct_3_grams(passages[:, PROMPT:]),
        "targets": results,
    }
    return figures, drawn


def plot(drawn: dict[str, Any], model: str, target: float, path: Path) -> None:
    """Draw tempered entropy and temperature of the first prompt's continuation under each law to `path`."""
    figure, axes = pyplot().subplots(2, 1, figsize=(7, 4), sharex=True, layout="constrained")
    for name, shown in drawn.items():
        axes[0].plot(shown["tempered_entropy"][:, 0], label=name, linewidth=0.8)
        axes[1].plot(shown["temperature"][:, 0], linewidth=0.8)
    axes[0].axhline(target, color="black", linewidth=0.8, linestyle="--", label="target")
    axes[0].set(ylabel="tempered entropy, nats", ylim=(0, None))
    axes[0].legend(ncols=4, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    axes[0].set_title(f"{model}, target {target} nats", loc="left", fontsize=9)
    axes[1].set(ylabel="temperature", xlabel="token", ylim=(0, 1.05 * HIGH))
    print(f"\n{path.name}: {save(figure, path)} bytes")


def main() -> None:
    parser = arguments.parser(__doc__, "case", "seed", results="temperature.json")
    parser.add_argument("--targets", type=float, nargs="+", default=[1.0, 2.0, 3.0], help="nats (default 1 2 3)")
    parser.add_argument("--prompts", type=arguments.count(), default=8, help="sequences, decoded together (default 8)")
    parser.add_argument("--tokens", type=arguments.count(), default=256, help="tokens of each (default 256)")
    parser.add_argument("--burn-in", type=arguments.count(0), default=32, help="first tokens left out (default 32)")
    parser.add_argument("--plot", action="store_true", help="draw the first model to docs/figures/temperature.png")
    parser.add_argument("--plot-target", type=float, default=2.0, help="target of the figure (default 2)")
    args = parser.parse_args()
    cases = []
    with arguments.refusals("measure_temperature"):
        for name, text in args.case:
            figures, drawn = measure(name, Path(text), args)
            for target in args.targets:
                print(f"\n{tables.temperature([figures], target)}")
            print(f"\nDistinct 3-grams of {figures['text']}: {figures['distinct_3_grams_of_the_text']:.3g}", flush=True)
            cases.append(figures)
            if args.plot and len(cases) == 1:
                plot(drawn, figures["model"], args.plot_target, FIGURES / "temperature.png")
    names = ("prompts", "tokens", "burn_in", "seed")
    settings = {name: getattr(args, name) for name in names} | {"prompt_tokens": PROMPT, "clip": [LOW, HIGH]}
    write(args.output, "scripts/measure_temperature.py", settings | {"dtype": "float32"}, models=cases)


if __name__ == "__main__":
    main()
