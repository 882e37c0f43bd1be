"""Runs of the recipe over tiny targets: a target that can chat, a settings file, and the command line."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.distill.__main__ import main
from examples.distill.answers import Answer
from examples.distill.features import cache_features
from examples.distill.run_folder import PARTS, RunFolder, write_rows
from examples.distill.settings import Settings
from tests.cli.invoke import Result
from tests.runtime.tiny_tokenizers import CHATML, byte_level
from tests.tiny import write_target

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 430


def write_speaking_target(folder: Path, *, chat_template: str | None = CHATML, **overrides: Any) -> Path:
    """A random Qwen3 target with a tokenizer."""
    from transformers import PreTrainedTokenizerFast

    write_target(folder, "qwen3", **{"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "eos_token_id": 2} | overrides)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>", pad_token="<|endoftext|>")
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder


def write_settings(path: Path, **sections: dict[str, Any]) -> Path:
    lines = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tiny_sections(target: Path, prompts: Path, **training: Any) -> dict[str, dict[str, Any]]:
    """Settings under which every stage takes seconds; a fifth of the prompts is held out."""
    return {
        "target": {"checkpoint": str(target)},
        "prompts": {"files": [str(prompts)], "held_out_share": 0.2},
        "answers": {"max_new_tokens": 24, "precision": "float32"},
        "features": {"shard_sequences": 16},
        "drafter": {
            "num_layers": 1,
            "block_size": 4,
            "mask_token_id": 0,
            "tap_layers": [0, 1],
            "refiner_rank": 8,
            "refiner_mlp_hidden": 16,
            "num_passes": 2,
        },
        "training": {"precision": "float32", "sequences": 4, "blocks": 4, "warmup_steps": 4, "log_steps": 1} | training,
        "evaluation": {"passes": [0, 1, 2], "draft_steps": [1, 2], "max_new_tokens": 16, "capacity": 96},
    }


def write_prompts(path: Path, count: int) -> Path:
    write_rows(path, [{"prompt": f"Tell me about {number} and {number * number}."} for number in range(count)])
    return path


def recipe(*words: object) -> Result:
    """The recipe's command line, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(ROOT):
        try:
            main([str(word) for word in words])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Result(code, out.getvalue(), err.getvalue())


def refused(*words: object, code: int = 2) -> str:
    """The one line that a command ends with when it refuses."""
    result = recipe(*words)
    assert result.exit_code == code, result.err
    lines = result.err.splitlines()
    assert lines[-1].startswith("error: ")
    assert "Traceback" not in result.err
    return lines[-1].removeprefix("error: ")


def features_of(settings: Settings, folder: RunFolder, texts: Sequence[tuple[list[int], list[int]]]) -> None:
    """Cache features of prompts and answers that did not come from a target's own generation, the same for both parts."""
    for part in PARTS:
        folder.make(folder.answers(part))
        write_rows(folder.prompts(part), [{"id": f"{index:04d}", "family": "test", "messages": []} for index in range(len(texts))])
        answers = [Answer(f"{index:04d}", "test", prompt, answer) for index, (prompt, answer) in enumerate(texts)]
        write_rows(folder.answers(part) / "process-0.jsonl", [vars(answer) for answer in answers])
    torch.manual_seed(0)
    cache_features(settings, folder, lambda _: None)
