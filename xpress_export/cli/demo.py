"""`xpress-export demo`: a real target and its drafter, built on this machine, and what speculation gains on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xpress_export.cli.options import combined, json_option, threads_option
from xpress_export.cli.progress import progress
from xpress_export.cli.quiet import quiet_libraries
from xpress_export.cli.show import table

if TYPE_CHECKING:
    from xpress_export.bench.figures import Measurements
    from xpress_runtime.bundle import Bundle

# Of the held-out prompts, one of each kind: explanation, arithmetic, list, code.
_PROMPT_INDICES = (4, 5, 15, 19)
# Checkpoints, tokenizer, graphs, manifest.
_NUM_BUILD_STEPS = 30
_MODES = {
    "plain": "plain decoding",
    "drafter": "drafter only (K=0)",
    "refined": "drafter and refiner",
    "auto": "the same, as far as it pays (auto)",
}


@click.command("demo")
@combined(
    click.option(
        "--cache",
        type=click.Path(path_type=Path),
        help="Where target and bundle are kept. Default: $XPRESS_EXPORT_CACHE, else the user's cache folder.",
    ),
    click.option("--max-new-tokens", type=click.IntRange(2, 512), default=64, show_default=True, help="Tokens per prompt."),
    click.option("--no-parity", is_flag=True, help="Do not compare a newly built bundle with PyTorch and transformers."),
    threads_option,
    json_option,
)
def command(cache: Path | None, max_new_tokens: int, no_parity: bool, threads: int | None, as_json: bool) -> None:
    """Download SmolLM2-135M-Instruct once, build its bundle once, and measure plain against speculative decoding.

    All figures are measured in this run. The drafter in this package was trained for under an hour on a CPU.
    """
    from xpress_export.bench.figures import Measurements
    from xpress_export.bench.measure import measure, num_steps
    from xpress_export.bench.modes import Mode
    from xpress_export.bench.prompts import PromptLine, encode_prompts
    from xpress_export.demo.target import default_cache, demo_prompts
    from xpress_runtime.generation import GenerationConfig
    from xpress_runtime.session import Session

    cache = cache or default_cache()
    bundle = _bundle(cache, check=not no_parity, quiet=as_json)
    lines = [PromptLine(f"prompt {index}", "demo", demo_prompts()[index]) for index in _PROMPT_INDICES]
    configs = {
        "plain": GenerationConfig(max_new_tokens, speculation="off"),
        "drafter": GenerationConfig(max_new_tokens, num_passes=0),
        "refined": GenerationConfig(max_new_tokens),
        "auto": GenerationConfig(max_new_tokens, speculation="auto"),
    }
    modes = [Mode(name, name, (), config) for name, config in configs.items()]
    with Session.open(bundle.folder, "ort-cpu", threads=threads, verify=False) as session:
        prompts = encode_prompts(session, lines)
        with progress("measuring", num_steps(prompts, modes, 1), quiet=as_json) as report:
            measured = Measurements(prompts, modes, measure(session, prompts, modes, report=report))
    summary = _summary(bundle, measured)
    click.echo(json.dumps(summary) if as_json else _shown(measured, summary))


def _bundle(cache: Path, *, check: bool, quiet: bool) -> Bundle:
    from xpress_export.demo.bundle import build_demo_bundle, demo_bundle_folder, find_demo_bundle, open_demo_checkpoints
    from xpress_export.demo.target import fetch_demo_target

    folder = demo_bundle_folder(cache)
    found = find_demo_bundle(folder)
    if found is not None:
        if not quiet:
            click.echo(f"using the bundle in {folder}", err=True)
        return found
    quiet_libraries()
    gguf = fetch_demo_target(cache, report=lambda line: None if quiet else click.echo(line, err=True))
    with progress("build", _NUM_BUILD_STEPS, quiet=quiet) as report:
        report("checkpoints")
        target, drafter, draft_model = open_demo_checkpoints(gguf)
        built = build_demo_bundle(target, drafter, draft_model, folder, report)
    if check:
        from xpress_export.cli.parity import run_parity
        from xpress_export.parity.report import require_passed

        built = run_parity(built, target, drafter, draft_model, as_json=quiet)
        assert built.manifest.parity is not None
        require_passed(built.manifest.parity)
    return built


def _summary(bundle: Bundle, measured: Measurements) -> dict[str, Any]:
    results = {mode: [measured.of_prompt(mode, prompt)[0].result for prompt in measured.prompts] for mode in _MODES}
    figures = {mode: measured.figures(mode) for mode in _MODES}
    modes: dict[str, dict[str, Any]] = {}
    for mode, made in figures.items():
        tau, per_token, stages = made.mean_acceptance_length, made.ms_per_token, made.stage_ms_per_token
        # The demo's prompts are answered by more than one token.
        assert tau is not None and per_token is not None and stages is not None
        modes[mode] = {
            "tokens": made.tokens,
            "ms_per_token": per_token.value,
            "mean_acceptance_length": tau.value,
            "acceptance_by_position": list(made.acceptance_by_position),
            "host_share": stages["host"] / per_token.value,
        }
    return {
        "bundle": str(bundle.folder),
        "speedup": modes["plain"]["ms_per_token"] / modes["refined"]["ms_per_token"],
        "speedup_auto": modes["plain"]["ms_per_token"] / modes["auto"]["ms_per_token"],
        "speedup_drafter": modes["plain"]["ms_per_token"] / modes["drafter"]["ms_per_token"],
        "num_passes": bundle.manifest.num_passes[0],
        "break_even_acceptance_length": {mode: figures[mode].break_even for mode in _MODES if mode != "plain"},
        "same_text": all(made.text == plain.text for each in results.values() for made, plain in zip(each, results["plain"], strict=True)),
        "modes": modes,
        "prompts": [
            {
                "prompt": prompt.excerpt,
                "text": results["refined"][index].text,
                "ms_per_token": {mode: results[mode][index].stats.ms_per_token for mode in _MODES},
            }
            for index, prompt in enumerate(measured.prompts)
        ],
    }


def _shown(measured: Measurements, summary: dict[str, Any]) -> str:
    lines = []
    for entry in summary["prompts"]:
        text = " ".join(entry["text"].split())
        lines += [f"> {entry['prompt']}", f"  {text if len(text) <= 300 else text[:297] + '...'}", ""]
    rows = []
    for mode, name in _MODES.items():
        made, drafted = summary["modes"][mode], mode != "plain"
        rows.append(
            [
                name,
                f"{made['ms_per_token']:.1f}",
                f"{summary['modes']['plain']['ms_per_token'] / made['ms_per_token']:.2f}x",
                f"{made['mean_acceptance_length']:.2f}" if drafted else "1",
                f"{summary['break_even_acceptance_length'][mode]:.2f}" if drafted else "",
                # A slot that was never verified has none.
                " ".join("-" if share is None else f"{share:.2f}" for share in made["acceptance_by_position"]),
            ]
        )
    lines.append(table(["", "ms per token", "speed-up", "tokens per round", "break-even", "accepted at position 1, 2, …"], rows))
    passes = summary["num_passes"]
    gains = [gain for prompt in measured.prompts if (gain := measured.speedup_of_prompt("refined", prompt)) is not None]
    same = "All of them gave the same text." if summary["same_text"] else "THE TEXTS DIFFER: this is a defect or a near tie; run parity."
    lines += [
        "",
        f"{same} The model is tiny and often wrong; answers are cut at the token limit.",
        "Tokens per round: what one pass of the target yields (mean acceptance length). A mode is faster than plain decoding where this",
        "exceeds the break-even, the time of a round over that of a plain step. Accepted at position: the share of rounds in which the",
        f"first, second, … proposed token was right. The refiner made {passes} passes over each block.",
        _verdict(gains, summary["speedup"]),
        "",
        f"bundle: {summary['bundle']}",
        f'try: xpress-export generate {summary["bundle"]} "Explain rainbows." --stats',
        f"     xpress-export bench {summary['bundle']} --output report",
    ]
    return "\n".join(lines)


def _verdict(gains: list[float], pooled: float) -> str:
    """What the measurement supports: a gain or a loss only where every prompt shows it."""
    span = f"{pooled:.2f}x, from {min(gains):.2f}x to {max(gains):.2f}x by prompt" if gains else f"{pooled:.2f}x"
    if gains and min(gains) > 1:
        return f"Speculation pays on this machine: {span}."
    if gains and max(gains) < 1:
        return f"Speculation does not pay yet on this machine: {span}. A drafter that was trained for longer yields more a round."
    return f"Speculation and plain decoding are too close to call on this machine: {span}."
