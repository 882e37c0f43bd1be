"""The ``config.pbtxt`` of a packaged bundle: its tensors, its instances and the parameters that ``model.py`` reads.

Writes protobuf's text format; knows nothing about folders or bundles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

BACKEND = "python"

InstanceKind = Literal["KIND_CPU", "KIND_GPU", "KIND_AUTO"]


@dataclass(frozen=True)
class Tensor:
    """An input or output. ``dims``: 1 for one value, -1 for any number of them."""

    name: str
    data_type: str
    dims: int = 1


# All optional: which of them go together is model.py's to check, with an error that says so.
INPUTS = (
    Tensor("PROMPT", "TYPE_STRING"),
    Tensor("MESSAGES", "TYPE_STRING"),
    Tensor("INPUT_IDS", "TYPE_INT64", -1),
    Tensor("RAW", "TYPE_BOOL"),
    Tensor("THINKING", "TYPE_BOOL"),
    Tensor("STREAM", "TYPE_BOOL"),
    Tensor("MAX_TOKENS", "TYPE_INT64"),
    Tensor("STOP", "TYPE_STRING", -1),
    Tensor("STOP_TOKEN_IDS", "TYPE_INT64", -1),
    Tensor("IGNORE_STOP", "TYPE_BOOL"),
    # In double precision, as everywhere else: a temperature of 0.7 is then the same one, and so are its tokens.
    Tensor("TEMPERATURE", "TYPE_FP64"),
    Tensor("TOP_K", "TYPE_INT64"),
    Tensor("TOP_P", "TYPE_FP64"),
    Tensor("MIN_P", "TYPE_FP64"),
    Tensor("REPETITION_PENALTY", "TYPE_FP64"),
    Tensor("PRESENCE_PENALTY", "TYPE_FP64"),
    Tensor("FREQUENCY_PENALTY", "TYPE_FP64"),
    Tensor("SEED", "TYPE_INT64"),
    Tensor("SPECULATION", "TYPE_STRING"),
    Tensor("NUM_PASSES", "TYPE_INT64"),
    Tensor("SHORTLIST", "TYPE_INT64"),
    Tensor("DRAFT_STEPS", "TYPE_INT64"),
)

# Of every response. Text, tokens and counts are what this response adds; the reason and the statistics are empty in all but the last.
OUTPUTS = (
    Tensor("TEXT", "TYPE_STRING"),
    Tensor("TOKEN_IDS", "TYPE_INT64", -1),
    Tensor("PROPOSED_TOKENS", "TYPE_INT64"),
    Tensor("ACCEPTED_TOKENS", "TYPE_INT64"),
    Tensor("FINISH_REASON", "TYPE_STRING"),
    Tensor("STATS", "TYPE_STRING"),
)


def config_text(name: str, *, instances: int, kind: InstanceKind, parameters: Mapping[str, str], comment: str) -> str:
    """All of config.pbtxt. ``instances``: sessions, per GPU where ``kind`` is that of GPUs; ``comment``: lines for its head."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines += [
        f"name: {_quoted(name)}",
        f"backend: {_quoted(BACKEND)}",
        # Requests are batched inside, round by round; Triton hands each one over as it comes.
        "max_batch_size: 0",
        # A request has as many responses as it has steps.
        "model_transaction_policy { decoupled: true }",
        f"instance_group [ {{ count: {instances} kind: {kind} }} ]",
    ]
    lines += [_tensor("input", tensor, " optional: true") for tensor in INPUTS]
    lines += [_tensor("output", tensor, "") for tensor in OUTPUTS]
    lines += [
        f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}" for key, value in sorted(parameters.items())
    ]
    return "\n".join(lines) + "\n"


def _tensor(kind: str, tensor: Tensor, more: str) -> str:
    return f"{kind} {{ name: {_quoted(tensor.name)} data_type: {tensor.data_type} dims: [ {tensor.dims} ]{more} }}"


def _quoted(text: str) -> str:
    # JSON's escapes are among those of protobuf's text format, but for pairs of surrogates.
    return json.dumps(text, ensure_ascii=False)
