"""What the published implementations compute, reached through the exported graphs and the runtime: every round, every pass, every K."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import CONFORMANCE, Built
from xpress_runtime.backends import open_backend
from xpress_runtime.drafters import BlockDrafter
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.loop import SpeculativeLoop
from xpress_runtime.plan import Plan
from xpress_runtime.session import Session
from xpress_runtime.stats import GenerationStats

# Largest absolute error of hidden states and logits against the published implementation, fp32 on both sides.
TOLERANCE = 1e-4


def _expected(case: str) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads((CONFORMANCE / case / "expected.json").read_text(encoding="utf-8"))
    return expected


def _needed(lengths: list[int], num_tokens: int) -> list[int]:
    """The rounds that it takes to make ``num_tokens``: the published loop runs one more where the last round ends exactly there."""
    made = 1
    for index, length in enumerate(lengths):
        if made >= num_tokens:
            return lengths[:index]
        made += length
    return lengths


def test_tokens_and_acceptance_lengths(conformance: tuple[str, Built]) -> None:
    case, built = conformance
    expected = _expected(case)
    num_tokens = expected["max_new_tokens"]
    with Session(built.bundle, open_backend("ort-cpu", threads=1)) as session:
        for prompt in expected["prompts"]:
            plain = session.generate(prompt["prompt"], GenerationConfig(num_tokens, speculation="off", ignore_stop=True))
            assert list(plain.tokens) == prompt["plain"]
            for num_passes, run in prompt["by_passes"].items():
                result = session.generate(prompt["prompt"], GenerationConfig(num_tokens, num_passes=int(num_passes), ignore_stop=True))
                assert list(result.tokens) == run["tokens"]
                assert result.stats.acceptance_lengths == _needed(run["acceptance_lengths"], num_tokens), f"K = {num_passes}"


def test_every_round(conformance: tuple[str, Built]) -> None:
    case, built = conformance
    arrays = load_file(CONFORMANCE / case / "expected.safetensors")
    num_passes = built.bundle.manifest.num_passes[0]
    plan = Plan(built.bundle, open_backend("ort-cpu", threads=1))
    loop = SpeculativeLoop(plan, BlockDrafter(plan, num_passes))
    compared = 0
    for prompt_index, prompt in enumerate(_expected(case)["prompts"]):
        stats = GenerationStats(len(prompt["prompt"]), plan.block_size - 1, num_passes)
        if "rounds" not in prompt:
            continue
        loop.start(0, prompt["prompt"], stats)
        for round_index, expected in enumerate(prompt["rounds"]):
            assert int(plan.buffers.position.read()[0]) == expected["start"]
            assert int(plan.buffers.anchor.read()[0]) == expected["anchor"]
            assert int(plan.buffers.predecessor.read()[0]) == expected["predecessor"]
            current = plan.begin_round(plan.block_size)
            BlockDrafter(plan, num_passes).draft()
            for passes, drafts in enumerate(expected["passes"]):
                BlockDrafter(plan, passes).refine()
                assert plan.drafts()[1][0].tolist() == drafts, f"round {round_index}, pass {passes}"
            loop.verification.run(current)
            loop.verification.commit()
            current.result.report.send()
            committed = plan.collect(current)
            assert int(committed.accepted[0]) == expected["accepted"]
            found = plan.last_round()
            for ours, theirs in (
                ("hidden", "hidden"),
                ("base_logits", "base"),
                ("refined_logits", "refined"),
                ("verify_logits", "verify_logits"),
            ):
                reference = arrays[f"p{prompt_index}.r{round_index}.{theirs}"]
                np.testing.assert_allclose(found[ours][0], reference, rtol=0, atol=TOLERANCE, err_msg=f"{theirs} of round {round_index}")
            compared += 1
    assert compared == len([key for key in arrays if key.endswith(".hidden")])


@pytest.mark.parametrize("num_rows", [2, 3])
def test_a_batch_of_prompts_gives_what_each_gives_alone(conformance: tuple[str, Built], num_rows: int) -> None:
    case, built = conformance
    expected = _expected(case)
    num_passes = built.bundle.manifest.num_passes[0]
    plan = Plan(built.bundle, open_backend("ort-cpu", threads=1), num_rows=num_rows)
    loop = SpeculativeLoop(plan, BlockDrafter(plan, num_passes))
    prompts = expected["prompts"][:num_rows]
    stats = GenerationStats(0, plan.block_size - 1, num_passes)
    outputs = [[loop.start(row, prompt["prompt"], stats)] for row, prompt in enumerate(prompts)]
    lengths: list[list[int]] = [[] for _ in prompts]
    while min(len(tokens) for tokens in outputs) < expected["max_new_tokens"]:
        committed = loop.round(stats)
        for row in range(num_rows):
            outputs[row] += committed.tokens[row, : committed.num_emitted[row]].tolist()
            lengths[row].append(int(committed.num_emitted[row]))
    for row, prompt in enumerate(prompts):
        run = prompt["by_passes"][str(num_passes)]
        assert outputs[row][: len(run["tokens"])] == run["tokens"]
        assert lengths[row][: len(run["acceptance_lengths"])] == run["acceptance_lengths"]
