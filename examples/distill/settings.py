"""What one run is made of: a TOML file, read strictly. Every stage takes its section; defaults are those of the paper where it has one.

Knows names, types and ranges; knows nothing of models or files but the TOML file itself.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from xpress_runtime.errors import OptionError

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Weight = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Precision = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TargetSettings(Section):
    """``checkpoint``: a folder, a .gguf file, a hub id, or "demo" for the demo's target. ``precision`` is that of features."""

    checkpoint: Annotated[str, Field(min_length=1)]
    revision: str | None = None
    precision: Precision = "float32"


class PromptSettings(Section):
    """``families``: training prompts per family of ``prompt_families/``. ``files``: JSONL of your own, with ``prompt`` or ``messages``.

    ``held_out`` prompts per family are kept for evaluation; of a file about ``held_out_share``, one at least. ``never``: JSONL files whose
    prompts must not be trained on. ``thinking``: what the chat template is told, None where it has no such switch.
    """

    families: dict[str, Annotated[int, Field(ge=0, le=10**7)]] = {}
    files: list[str] = []
    never: list[str] = []
    held_out: Annotated[int, Field(ge=1, le=10**5)] = 24
    held_out_share: Share = 0.05
    format: Literal["chat", "text"] = "chat"
    thinking: bool | None = None
    seed: int = 0

    @field_validator("thinking")
    @classmethod
    def _takes_a_chat(cls, thinking: bool | None, info: ValidationInfo) -> bool | None:
        if thinking is not None and info.data.get("format") == "text":
            raise PydanticCustomError("thinking", 'only a chat template can switch it, and format is "text"; leave one of them out')
        return thinking


class AnswerSettings(Section):
    """``temperature`` 0 is greedy. ``precision`` is the target's while it answers; answers are what is learned, whatever wrote them."""

    max_new_tokens: Count = 256
    temperature: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    batch_size: Count = 32
    precision: Precision = "bfloat16"
    seed: int = 0


class FeatureSettings(Section):
    """``cache``: how taps lie on disk. ``max_length`` tokens are kept: longer answers are cut, longer prompts left out."""

    cache: Literal["float16", "bfloat16"] = "float16"
    max_length: Count = 1024
    batch_tokens: Count = 4096
    shard_sequences: Count = 256


class DrafterSettings(Section):
    """Sizes of the drafter; what is None is taken from the target, tap layers as DFlash spreads them.

    ``num_passes``: those of a request that asks for no other number, None for 6 or as many as settle every slot. ``draft_vocab_size``: at
    most that many tokens are drafted, those that the answers hold most often, through a head of the drafter's own; None for all tokens.
    """

    num_layers: Count = 5
    block_size: Annotated[int, Field(ge=2, le=64)] = 16
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    tap_layers: list[Annotated[int, Field(ge=0)]] | None = None
    intermediate_size: Count | None = None
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    refiner_rank: Annotated[int, Field(ge=0, le=4096)] = 256
    refiner_mlp_hidden: Count = 512
    num_passes: Annotated[int, Field(ge=0, le=64)] | None = None
    markov_rank: Annotated[int, Field(ge=0, le=4096)] = 0
    draft_vocab_size: Annotated[int, Field(ge=2, le=2**31 - 1)] | None = None


class TrainingSettings(Section):
    """One step takes ``sequences`` per process and ``blocks`` anchors of each.

    Loss: ``refined_weight`` · teacher-forced refined cross-entropy + ``free_weight`` · the mean over ``free_rounds`` free-running Jacobi
    rounds + ``base_weight`` · base logits; on each, ``tv_weight`` · total variation to the target's own distribution is added. Slot k of a
    block counts exp(-(k - 1) / ``position_decay``). ``revealed_share`` of the blocks show some of their tokens, so that several denoising
    steps work. ``vocabulary``: softmax over all tokens, or over those that occur in the answers (faster where the vocabulary is large);
    with a draft vocabulary always over that.
    """

    steps: Count = 20000
    sequences: Count = 16
    blocks: Count = 16
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 6e-4
    warmup_steps: Annotated[int, Field(ge=0)] = 200
    final_learning_rate: Share = 0.05
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.01
    max_gradient_norm: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    refined_weight: Weight = 1.0
    free_weight: Weight = 0.3
    free_rounds: Annotated[int, Field(ge=0, le=16)] = 2
    base_weight: Weight = 0.6
    tv_weight: Weight = 0.1
    position_decay: Annotated[float, Field(gt=0, le=1000)] = 4.0
    revealed_share: Share = 0.25
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    feature_noise: Annotated[float, Field(ge=0, le=10)] = 0.1
    vocabulary: Literal["all", "seen"] = "seen"
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    warm_start: str | None = None
    checkpoint_minutes: Annotated[float, Field(gt=0, le=1440)] = 5.0
    evaluate_steps: Count = 500
    log_steps: Count = 20
    seed: int = 0


class DraftModelSettings(Section):
    """The autoregressive drafter of group B: the target's own architecture with ``num_layers`` layers, and its embedding and head."""

    num_layers: Annotated[int, Field(ge=0, le=128)] = 0
    steps: Count = 2000
    sequences: Count = 16
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 6e-4


class EvaluationSettings(Section):
    """``passes`` and ``draft_steps`` that are measured, in the real loop, ``prompts`` of each family (0: all)."""

    passes: list[Annotated[int, Field(ge=0, le=64)]] = [0, 1, 2, 4]
    draft_steps: list[Annotated[int, Field(ge=1, le=64)]] = [1, 2, 4]
    prompts: Annotated[int, Field(ge=0, le=10**5)] = 0
    max_new_tokens: Count = 128
    capacity: Count = 1024


class Settings(Section):
    """All of a run."""

    target: TargetSettings
    prompts: PromptSettings = PromptSettings()
    answers: AnswerSettings = AnswerSettings()
    features: FeatureSettings = FeatureSettings()
    drafter: DrafterSettings = DrafterSettings()
    training: TrainingSettings = TrainingSettings()
    draft_model: DraftModelSettings = DraftModelSettings()
    evaluation: EvaluationSettings = EvaluationSettings()


def read_settings(path: Path) -> Settings:
    """Read a run's TOML file. Raises OptionError with the first thing that is wrong."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OptionError(f"{path} does not exist; the presets lie in examples/distill/presets") from None
    except OSError as problem:
        raise OptionError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise OptionError(f"{path} is not valid TOML: {problem}") from None
    try:
        return Settings.model_validate(values)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise OptionError(f"{path}: {where}: there is no such setting{_meant(first['loc'])}") from None
        found = "" if first["type"] == "missing" else f", found {first['input']!r:.80}"
        raise OptionError(f"{path}: {where}: {first['msg'].lower()}{found}") from None


def _meant(place: tuple[int | str, ...]) -> str:
    """The setting or section whose name is most like the last of ``place``."""
    names: Iterable[str] = Settings.model_fields
    if len(place) > 1:
        section = Settings.model_fields[str(place[0])].annotation
        names = section.model_fields if isinstance(section, type) and issubclass(section, Section) else ()
    close = difflib.get_close_matches(str(place[-1]), names, 1)
    return f"; did you mean {close[0]}?" if close else "; settings.py lists all"
