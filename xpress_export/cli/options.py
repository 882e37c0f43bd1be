"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xpress_runtime.errors import OptionError
from xpress_runtime.generation import DRAFTERS, SPECULATION, GenerationConfig

if TYPE_CHECKING:
    from xpress_engines.profiles import ProfileSet
    from xpress_export.checkpoints import DrafterCheckpoint, DraftModelCheckpoint, TargetCheckpoint
    from xpress_export.options import BuildOptions
    from xpress_runtime.session import Session

_LONGEST_RANGE = 10_000

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class IntegersType(click.ParamType["tuple[int, ...]"]):
    """A comma-separated list of integers, such as ``4,2,1``; with ``ranges`` also ``0-7,28``."""

    def __init__(self, name: str, *, ranges: bool = False) -> None:
        self.name = name
        self._ranges = ranges

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(integer for part in str(value).split(",") for integer in self._part(part))
        except ValueError:
            self.fail(f"{value!r} is not a list of integers such as {'0-7,28' if self._ranges else '4,2,1'}", param, ctx)

    def _part(self, part: str) -> range:
        first, dash, last = part.partition("-")
        if not (self._ranges and dash):
            return range(int(part), int(part) + 1)
        if int(last) < int(first) or int(last) - int(first) > _LONGEST_RANGE:
            raise ValueError
        return range(int(first), int(last) + 1)


def combined(*options: Decorator) -> Decorator:
    """Several options as one decorator, in the order given."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
threads_option = click.option("--threads", type=click.IntRange(1, 1024), help="Threads of one operator; default: all usable cores.")

checkpoint_options = combined(
    click.option("--target", required=True, help="Target LLM: a folder, a .gguf file or a hub id."),
    click.option("--target-revision", help="Revision of a target on the hub."),
    click.option("--drafter", required=True, help="Drafter of any published format: a folder, a .pt file or a hub id."),
    click.option("--drafter-revision", help="Revision of a drafter on the hub."),
)

build_options = combined(
    click.option(
        "--num-passes",
        type=IntegersType("K[,K…]"),
        help="Jacobi passes to build, the default first; 0 is always built. Default: the checkpoint's.",
    ),
    click.option(
        "--shortlist",
        "shortlists",
        type=IntegersType("C[,C…]"),
        help="Candidates of a slot that passes score, the default first; 0: all of the vocabulary. Default: the checkpoint's.",
    ),
    click.option(
        "--capacity",
        type=click.IntRange(2),
        help="Tokens of prompt and output together. Default: 2048, or the target's positions if fewer.",
    ),
    click.option("--batch", type=click.IntRange(1, 1024), help="Rows that the bundle is planned for. Default: 1."),
    click.option("--prefill-chunk", type=click.IntRange(1, 8192), help="Prompt tokens that run at once. Default: 128."),
    click.option(
        "--sampling/--no-sampling", default=True, show_default=True, help="Build the graphs for sampling. Without them decoding is greedy."
    ),
)

draft_model_options = combined(
    click.option("--draft-model", help="An autoregressive drafter beside the block drafter: a causal LM with the target's tokenizer."),
    click.option("--draft-model-revision", help="Revision of a draft model on the hub."),
    click.option(
        "--draft-layers",
        type=IntegersType("I[,I-J…]", ranges=True),
        help="Draft with these layers alone, such as 0-7,28,29; without --draft-model: of the target itself.",
    ),
)

compute_capability_option = click.option(
    "--compute-capability", multiple=True, metavar="X.Y", help="GPUs to build for, such as 8.9; may be given several times. Default: all."
)
timing_cache_option = click.option(
    "--timing-cache", type=click.Path(path_type=Path), help="Keep what TensorRT measures in this file, so that the next build is faster."
)

engine_options = combined(
    click.option("--engine", "engines", multiple=True, help="Build engines too: tensorrt-rtx, which needs no GPU, or tensorrt."),
    click.option(
        "--precision",
        "precisions",
        type=click.Choice(["fp32", "fp16", "bf16"]),
        multiple=True,
        help="Graphs to build: fp32 for CPUs, fp16 or bf16 for GPUs; may be given several times. Engines are built of the first for GPUs. "
        "Default: fp32, and with --engine fp16 too.",
    ),
    click.option("--profile", help="edge, server or a TOML file: defaults of --capacity, --batch and --prefill-chunk."),
    compute_capability_option,
    timing_cache_option,
)

session_options = combined(
    click.option(
        "--backend",
        default="auto",
        show_default=True,
        help="tensorrt, tensorrt-rtx, ort-cuda, ort-trt-rtx or ort-cpu; auto: the first that runs here and finds its engines or graphs.",
    ),
    click.option(
        "--runtime-cache",
        type=click.Path(path_type=Path, file_okay=False),
        help="Keep the kernels that TensorRT-RTX compiles for this GPU in this folder, so that the next start is quick.",
    ),
    threads_option,
    click.option("--no-verify", is_flag=True, help="Do not hash the bundle's files before use."),
)

chat_option = click.option(
    "--chat/--raw", default=None, help="Send a prompt as a chat message, or as plain text. Default: chat where there is a template."
)

thinking_option = click.option(
    "--thinking/--no-thinking", default=None, help="Switch thinking in a chat, where the template can. Default: the template's."
)


def chat_variables(session: Session, thinking: bool | None) -> dict[str, Any]:
    """Variables for the chat template; OptionError where it has no switch for thinking and one is asked for."""
    from xpress_runtime.fit import THINKING, switches_thinking

    if thinking is None:
        return {}
    if not switches_thinking(session.tokenizer):
        raise OptionError(f"the chat template of {session.bundle.folder} cannot switch thinking; leave out --thinking and --no-thinking")
    return {THINKING: thinking}


distribution_options = combined(
    click.option("--top-k", type=int, help="Sample from the K best tokens."),
    click.option("--top-p", type=float, default=1.0, show_default=True, help="Sample from the fewest tokens with this much probability."),
    click.option("--min-p", type=float, default=0.0, show_default=True, help="Leave out tokens less likely than this times the best."),
    click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="Over 1: against tokens of prompt and output."),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True, help="Against tokens that the output has."),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True, help="The same, for each time it has them."),
)

generation_options = combined(
    click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Tokens to generate at most."),
    click.option("--stop", multiple=True, help="A string that ends the text; may be given several times."),
    click.option("--ignore-stop", is_flag=True, help="Go on past stop tokens."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0: the best token every time; over 0: sampling."),
    distribution_options,
    click.option(
        "--seed", type=int, help="The same seed samples the same text, but for auto. Default: another one every time; --stats tells it."
    ),
    click.option(
        "--speculation",
        type=click.Choice(SPECULATION),
        default="on",
        show_default=True,
        help="off: plain decoding; auto: as many proposals as pay, down to none.",
    ),
    click.option(
        "--drafter",
        type=click.Choice(DRAFTERS),
        default="block",
        show_default=True,
        help="block: the bundle's drafter; autoregressive: its draft model; lookup: what followed the last words before.",
    ),
    click.option("--num-passes", type=int, help="Refinement (Jacobi) passes among those built; 0: the bare drafter."),
    click.option("--no-refiner", is_flag=True, help="The same as --num-passes 0."),
    click.option("--shortlist", type=int, help="Candidates of a slot that passes score, among those built; 0: all."),
    click.option("--draft-steps", type=int, default=1, show_default=True, help="Denoising steps of a block."),
)


def generation_config(options: Mapping[str, Any]) -> GenerationConfig:
    """What :data:`generation_options` were given; OptionError."""
    given = dict(options)
    if given.pop("no_refiner"):
        if given["num_passes"]:
            raise OptionError(f"--no-refiner means no passes, and --num-passes is {given['num_passes']}; leave one of them out")
        given["num_passes"] = 0
    config = GenerationConfig(**given)
    refuse_unused_sampling(given)
    return config


def refuse_unused_sampling(options: Mapping[str, Any]) -> None:
    """OptionError where a limit or a seed is given and nothing is sampled: greedy decoding would be the same without."""
    unused = {"top_k": None, "top_p": 1, "min_p": 0, "seed": None}
    if options["temperature"] == 0:
        for name, off in unused.items():
            if options[name] != off:
                option = f"--{name.replace('_', '-')}"
                raise OptionError(f"{option} is {options[name]}, and --temperature 0 samples nothing; give a temperature too")


warning_options = combined(
    click.option("--warn-acceptance", type=float, default=0.02, show_default=True, help="Warn below this acceptance rate."),
    click.option("--warn-round-ms", type=float, default=5000.0, show_default=True, help="Warn above this mean round time."),
)


def opened_draft_model(
    target: TargetCheckpoint, reference: str | None, revision: str | None, layers: tuple[int, ...] | None, *, config_only: bool = False
) -> DraftModelCheckpoint | None:
    """The autoregressive drafter that :data:`draft_model_options` ask for, if any; by its config alone where ``target`` is known by that.

    Raises what opening it raises.
    """
    from xpress_export.checkpoints import open_draft_model
    from xpress_export.checkpoints.draft_model_config import open_draft_model_config

    if reference is None and revision is not None:
        raise OptionError("--draft-model-revision is given without --draft-model; leave it out")
    if reference is None and layers is None:
        return None
    return (open_draft_model_config if config_only else open_draft_model)(reference, revision, layers, target)


def resolved_options(
    target: TargetCheckpoint, drafter: DrafterCheckpoint, options: Mapping[str, Any], profile: ProfileSet | None, profile_name: str | None
) -> BuildOptions:
    """Build options, with a profile's capacity, batch and prefill chunk where they were not given; OptionError."""
    from xpress_export.options import resolve_options

    if profile is None:
        return resolve_options(target, drafter, **options)
    taken = {name: getattr(profile, name) for name in ("capacity", "batch", "prefill_chunk") if options[name] is None}
    try:
        return resolve_options(target, drafter, **{**options, **taken})
    except OptionError as problem:
        named = str(problem)
        if any(named.startswith(f"--{name.replace('_', '-')} ") for name in taken):
            raise OptionError(f"profile {profile_name}: {named.removeprefix('--')}") from None
        raise
