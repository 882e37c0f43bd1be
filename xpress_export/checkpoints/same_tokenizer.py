"""Whether two checkpoints have the same tokenizer: the same id for every token, and the same ids for texts that tokenizers differ on.

An autoregressive drafter reads and writes the target's token ids. With another tokenizer it would draft nonsense without an error.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from xpress_export.checkpoints.locate import shown
from xpress_export.checkpoints.target import TargetCheckpoint
from xpress_export.checkpoints.tokenizer_files import write_tokenizer
from xpress_runtime.errors import PairingError
from xpress_runtime.tokenizer import TOKENIZER_FILE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

# Prose, numbers, white space, code, letters that compose, other scripts, bytes without tokens.
PROBES = (
    "The quick brown fox doesn't jump; it WALKS to Zürich.",
    "In 2024, 12345.67 people paid $99.95 (3×) at 10:30.",
    "  two  spaces\n\n\tand\ttabs \r\n",
    "def f(x: int) -> str:\n    return f'{x ** 2!r}' if x != 0 else None",
    "cafe\u0301 Ünï ½ ² \u00a0 don't I'LL",
    "日本語と中文 안녕하세요 Привет مرحبا",
    "🎉🎊 👩‍👩‍👧",
)


def check_same_tokenizer(target: TargetCheckpoint, model: TargetCheckpoint) -> None:
    """Raise :class:`PairingError` at the first difference. Where neither has a tokenizer, the vocabularies must be of one size."""
    named = f"draft model '{model.location.source}' and target '{target.location.source}'"
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = (_read(checkpoint, Path(folder) / name) for name, checkpoint in (("target", target), ("draft", model)))
    if theirs is None or ours is None:
        if theirs is not ours:
            which = "target" if ours is None else "draft model"
            raise PairingError(f"{named}: only the {which} has tokenizer files; give a draft model folder that has the target's tokenizer")
        if model.config.vocab_size != target.config.vocab_size:
            sizes = f"{model.config.vocab_size} and {target.config.vocab_size}"
            raise PairingError(f"{named} have no tokenizer files, and vocabularies of {sizes} tokens; a draft model needs the target's")
        logger.warning("%s have no tokenizer files; that their token ids mean the same is taken for granted", named)
        return
    difference = _different_token(ours.get_vocab(), theirs.get_vocab()) or _different_text(ours, theirs)
    if difference is not None:
        raise PairingError(f"{named} have different tokenizers: {difference}; a draft model needs the target's tokenizer")


def _read(checkpoint: TargetCheckpoint, folder: Path) -> Tokenizer | None:
    """The tokenizer as a bundle would have it; None where the checkpoint has none."""
    from tokenizers import Tokenizer

    if write_tokenizer(checkpoint.location.path, folder) is None:
        return None
    return Tokenizer.from_file(str(folder / TOKENIZER_FILE))


def _different_token(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str | None:
    """The first token, by the target's ids, whose id is another, and how many there are."""
    tokens = sorted(ours.keys() | theirs.keys(), key=lambda token: (theirs.get(token, len(theirs)), ours.get(token, 0)))
    different = [token for token in tokens if ours.get(token) != theirs.get(token)]
    if not different:
        return None
    first = different[0]
    more = f" ({len(different)} tokens differ)" if len(different) > 1 else ""
    return f"token '{shown(first)}' has {_id(ours, first)} and {_id(theirs, first)}{more}"


def _id(vocabulary: Mapping[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "no id"


def _different_text(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    for probe in PROBES:
        ids = [_encode(tokenizer, probe) for tokenizer in (ours, theirs)]
        if ids[0] != ids[1]:
            return f"{probe!r} becomes {shown(ids[0])} and {shown(ids[1])}"
    return None


def _encode(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """Without the special tokens around it, which only the target's prompts get; None where the vocabulary cannot say it."""
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    except Exception:  # noqa: BLE001, tokenizers raises no narrower type
        return None
    return ids
