"""Second stage: the target's own answers to the prompts, in batches, over as many processes as ``accelerate`` starts.

Every process appends whole lines to a file of its own. A run that was killed goes on where it stopped; a line that was cut off is taken
back. Knows nothing of features or drafters.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.distill.processes import this_process
from examples.distill.prompts import ROW
from examples.distill.run_folder import PARTS, RunFolder, check_same, read_rows, write_json
from examples.distill.settings import AnswerSettings, PromptSettings, Settings
from examples.distill.target import Target
from xpress_runtime.errors import CheckpointError, OutputError
from xpress_runtime.fit import THINKING, switches_thinking
from xpress_runtime.tokenizer import TextTokenizer

# Batches of about one length waste little on padding; windows keep the order random enough to stop anywhere.
_WINDOW = 8
_ANSWER = {"id": str, "family": str, "prompt": list, "answer": list}


@dataclass(frozen=True)
class Answer:
    """A prompt and what the target answered, as token ids. The answer ends with a stop token unless it was cut."""

    id: str
    family: str
    prompt: list[int]
    answer: list[int]

    def fits(self, limit: int) -> bool:
        """Whether ``limit`` tokens hold the prompt and some of the answer."""
        return len(self.prompt) + 1 < limit

    def tokens(self, limit: int) -> list[int]:
        """Prompt and answer, cut to ``limit`` tokens."""
        return (self.prompt + self.answer)[:limit]


def generate_answers(settings: Settings, folder: RunFolder, report: Callable[[str], None]) -> None:
    """Answer every prompt that has no answer yet."""
    state = this_process()
    say = report if state.is_main_process else lambda _: None
    target = Target(settings.target)
    depends = {
        "target": target.identity,
        **settings.answers.model_dump(exclude={"batch_size"}),
        **settings.prompts.model_dump(include={"format", "thinking"}),
    }
    tokenizer = None
    for part in PARTS:
        rows = read_rows(folder.prompts(part), "prompts", ROW)
        into = folder.answers(part)
        check_same(into / "answers.json", depends, "generate", "remove its answers and features")
        done = {row.id for row in read_answers(folder, part)}
        todo = [row for row in rows if row["id"] not in done]
        say(f"{part}: {len(done)} of {len(rows)} answers are there")
        # Others may still be looking at what is there.
        state.wait_for_everyone()
        if not todo:
            continue
        tokenizer = tokenizer or _tokenizer(target, settings.prompts)
        mine = todo[state.process_index :: state.num_processes]
        if state.is_main_process:
            write_json(into / "answers.json", depends)
        state.wait_for_everyone()
        _answer_all(target, settings, tokenizer, mine, into / f"process-{state.process_index}.jsonl", state.device, report)
        state.wait_for_everyone()


def read_answers(folder: RunFolder, part: str) -> list[Answer]:
    """The answers so far to a part's prompts, in the order of their ids; those to prompts that it no longer has are passed over."""
    wanted = prompt_ids(folder, part)
    found: dict[str, Answer] = {}
    for path in sorted(folder.answers(part).glob("process-*.jsonl")):
        _take_back_cut_line(path)
        for row in read_rows(path, "generate", _ANSWER):
            if row["id"] in wanted:
                found[row["id"]] = Answer(row["id"], row["family"], row["prompt"], row["answer"])
    return [found[name] for name in sorted(found)]


def prompt_ids(folder: RunFolder, part: str) -> set[str]:
    """Which prompts a part has."""
    return {row["id"] for row in read_rows(folder.prompts(part), "prompts", ROW)}


def encode(tokenizer: TextTokenizer, messages: Sequence[dict[str, str]], settings: PromptSettings) -> list[int]:
    """A prompt's tokens, as the runtime makes them: through the chat template, or the contents one after the other."""
    if settings.format == "chat":
        return tokenizer.encode_chat(messages, **chat_variables(settings))
    return tokenizer.encode(as_text(messages))


def as_text(messages: Sequence[dict[str, str]]) -> str:
    """Messages for a target that takes plain text."""
    return "\n".join(message["content"] for message in messages)


def chat_variables(settings: PromptSettings) -> dict[str, bool]:
    """What the chat template is told."""
    return {} if settings.thinking is None else {THINKING: settings.thinking}


def _tokenizer(target: Target, settings: PromptSettings) -> TextTokenizer:
    """The target's tokenizer; CheckpointError where it cannot make tokens of prompts in the way that the settings name."""
    tokenizer = target.tokenizer()
    if settings.format == "chat" and not tokenizer.has_chat_template:
        raise CheckpointError(f'{target.name} has no chat template; set format = "text" under [prompts] to give it the prompts as they are')
    if settings.thinking is not None and not switches_thinking(tokenizer):
        raise CheckpointError(f"the chat template of {target.name} cannot switch thinking; leave out thinking under [prompts]")
    return tokenizer


def _answer_all(
    target: Target,
    settings: Settings,
    tokenizer: TextTokenizer,
    rows: Sequence[dict[str, Any]],
    path: Path,
    device: torch.device,
    report: Callable[[str], None],
) -> None:
    model = target.model(settings.answers.precision, device)
    torch.manual_seed(settings.answers.seed)
    started = time.monotonic()
    num_rows = num_tokens = 0
    encoded = [(row, encode(tokenizer, row["messages"], settings.prompts)) for row in rows]
    for batch in _batches(encoded, settings.answers.batch_size):
        answers = _answer(model, [prompt for _, prompt in batch], settings.answers, target.stop_token_ids)
        lines = [
            {"id": row["id"], "family": row["family"], "prompt": prompt, "answer": answer}
            for (row, prompt), answer in zip(batch, answers, strict=True)
        ]
        _append(path, lines)
        num_rows += len(lines)
        num_tokens += sum(len(answer) for answer in answers)
        rate = num_tokens / (time.monotonic() - started)
        report(f"{path.parent.name}: {num_rows} of {len(rows)} answers, {num_tokens} tokens, {rate:.0f} tokens/s")


def _batches(encoded: list[tuple[dict[str, Any], list[int]]], size: int) -> Iterator[list[tuple[dict[str, Any], list[int]]]]:
    for start in range(0, len(encoded), size * _WINDOW):
        window = sorted(encoded[start : start + size * _WINDOW], key=lambda pair: len(pair[1]))
        for first in range(0, len(window), size):
            yield window[first : first + size]


@torch.inference_mode()
def _answer(model: Any, prompts: Sequence[Sequence[int]], settings: AnswerSettings, stop_token_ids: Sequence[int]) -> list[list[int]]:
    """Answers to a batch, each up to its stop token."""
    from transformers import GenerationConfig

    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    sampling = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0} if settings.temperature else {}
    # A config of our own: a checkpoint's may ask for sampling or penalties.
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=bool(sampling),
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=list(stop_token_ids) or None,
        pad_token_id=0,
        **sampling,
    )
    output = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), generation_config=config)
    stops = set(stop_token_ids)
    answers = []
    for row in output[:, longest:].tolist():
        end = next((index + 1 for index, token in enumerate(row) if token in stops), len(row))
        answers.append(row[:end])
    return answers


def _append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as problem:
        raise OutputError(f"{path} cannot be written: {problem.strerror or problem}; what it holds is kept, run 'generate' again") from None


def _take_back_cut_line(path: Path) -> None:
    """A kill or a full disk may leave a last line without its end."""
    try:
        with path.open("rb+") as stream:
            content = stream.read()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                stream.truncate(whole)
    except OSError as problem:
        raise OutputError(f"{path} cannot be read and written: {problem.strerror or problem}") from None
