"""The model card of a trained drafter: written with the weights, and again when it was evaluated. Says only what the run's files say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.distill.run_folder import RunFolder, read_json, write_text
from examples.distill.sizes import Sizes
from examples.distill.target import Target
from xpress_runtime.errors import OptionError


def write_card(folder: RunFolder, sizes: Sizes, target: Target) -> None:
    """Write ``drafter/README.md`` from ``drafter/training.json`` and, where there is one, ``evaluation/evaluation.json``."""
    made = read_json(folder.drafter / "training.json", "train")
    measured_path = folder.evaluation / "evaluation.json"
    measured = read_json(measured_path, "evaluate") if measured_path.is_file() else None
    try:
        lines = [*_front_matter(target), *_introduction(sizes, target), *_provenance(made, sizes), *_held_out(made)]
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise OptionError(f"{folder.drafter / 'training.json'} is not what 'train' writes ({problem}); run 'train' again") from None
    # Figures of an earlier checkpoint are not this one's.
    if measured is not None and measured["step"] == made["step"]:
        lines += _measured(measured)
    write_text(folder.drafter / "README.md", "\n".join(lines) + "\n")


def _front_matter(target: Target) -> Iterator[str]:
    yield "---"
    if target.checkpoint.licence is not None:
        yield f"license: {target.checkpoint.licence}"
    yield from (f"base_model: {target.title}", "tags: [speculative-decoding, dflash, xpress]", "---", "")


def _introduction(sizes: Sizes, target: Target) -> Iterator[str]:
    head = "an xPress refiner" if sizes.refiner_rank else "a Markov head" if sizes.markov_rank else "no head"
    yield f"# A block-diffusion drafter for {target.title}"
    yield ""
    yield f"DFlash backbone of {sizes.num_layers} layers with {head}, block size {sizes.block_size}, in the serving format that"
    yield "`xpress-export build --drafter` takes; half precision. It was trained on the target's own answers only,"
    yield "no other text."
    licence = target.checkpoint.licence
    yield (
        f"The target states the licence {licence}." if licence else "The target states no licence; ask its makers before passing this on."
    )


def _provenance(made: dict[str, Any], sizes: Sizes) -> Iterator[str]:
    training, answers = made["training"], made["answers"]
    families = ", ".join(f"{name} {count}" for name, count in made["prompts"]["families"].items())
    files = f"{len(made['prompts']['files'])} files of prompts" if made["prompts"]["files"] else ""
    how = "greedy" if not answers["temperature"] else f"temperature {answers['temperature']:g}, top-p {answers['top_p']:g}"
    begun = training["warm_start"] or "random parameters"
    # No place of one machine.
    begun = Path(begun).name if Path(begun).is_absolute() else begun
    yield from ("", "## Provenance", "", "| | |", "|---|---|")
    yield f"| taps | after layers {', '.join(map(str, sizes.tap_layers))} of {sizes.num_target_layers}, 0-based |"
    yield f"| mask token | id {sizes.mask_token_id} |"
    yield f"| prompts | {', '.join(part for part in (families, files) if part)} |"
    yield f"| answers | {made['sequences']:,}, {how}, {made['answer_tokens']:,} tokens, at most {answers['max_new_tokens']} each |"
    yield f"| begun with | {begun} |"
    yield f"| checkpoint | step {made['step']:,} of {training['steps']:,}, the best on held-out answers |"
    yield f"| a step | {training['sequences']} sequences × {training['blocks']} blocks in each process |"
    yield (
        f"| loss | {training['refined_weight']:g} · teacher-forced refined + {training['free_weight']:g} · "
        f"{training['free_rounds']} free-running rounds + {training['base_weight']:g} · base, "
        f"total variation × {training['tv_weight']:g}, slots weighted "
        f"exp(-(k-1)/{training['position_decay']:g}), {training['revealed_share']:.0%} of the blocks partly revealed |"
    )
    yield f"| softmax | over {made['softmax_tokens']:,} of {sizes.vocab_size:,} tokens |"
    if made["draft_tokens"] < sizes.vocab_size:
        yield f"| drafts | the {made['draft_tokens']:,} tokens that the answers hold most often, through the target's rows for them |"


def _held_out(made: dict[str, Any]) -> Iterator[str]:
    yield from (
        "",
        "## Held out",
        "",
        "Mean acceptance length by refinement passes K, on the target's answers to prompts that were not trained on, replayed",
    )
    yield from ("without the target:", "", "| K | τ |", "|---|---|")
    for name, value in sorted(made["held_out"].items()):
        yield f"| {name.removeprefix('tau_')} | {value:.3f} |"


def _measured(measured: dict[str, Any]) -> Iterator[str]:
    yield from ("", "## Measured", "")
    yield f"The real loop through an exported bundle ({measured['backend']}), {measured['prompts']} held-out prompts, greedy,"
    yield f"at most {measured['max_new_tokens']} tokens. {measured['agreement']}"
    yield "Speed-up is over plain decoding in the same run, with its 95 % interval."
    for title, rows in measured["tables"].items():
        yield from ("", f"### {title}", "", "| mode | τ | speed-up |", "|---|---|---|")
        yield from (f"| {row['mode']} | {row['tau']} | {row['speedup']} |" for row in rows)
