"""`bench` on a bundle that works: what it prints and writes, its exit codes, and what it refuses before anything is measured."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from tests.cli.conftest import Spoken
from tests.cli.invoke import Result, invoke
from xpress_export.bench import measure, memory
from xpress_export.bench.modes import GROUPS, SINGLE_GROUPS, Mode
from xpress_export.bench.prompts import BUILT_IN_SETS
from xpress_export.cli.bench import command
from xpress_runtime.errors import EnvironmentProblem
from xpress_runtime.generation import GenerationConfig, GenerationResult
from xpress_runtime.session import Session

LINES = (
    {"prompt": "Why?", "family": "short"},
    {"prompt": "Hello world, this is a test.", "family": "long"},
    {"messages": [{"role": "user", "content": "Who?"}], "family": "short"},
)


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in LINES), encoding="utf-8")
    return path


def bench(spoken: Spoken, *arguments: object) -> Result:
    """A short run."""
    return invoke("bench", spoken.bundle, "--max-new-tokens", 5, "--ignore-stop", *arguments)


def test_prints_tables_and_findings_and_writes_the_report(spoken: Spoken, asked: Path, tmp_path: Path) -> None:
    result = bench(spoken, "--prompts", asked, "--output", tmp_path / "report").assert_done()
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[0] == "3 prompts (short, long), at most 5 tokens, ort-cpu"
    rows = {line[:26].strip(): line for line in lines}
    for title in ("A: plain", "L: prompt lookup", "C: 3 steps, no refiner", "D: 1 step, K=1", "1 step, no refiner", "auto"):
        assert title in rows
    assert "Group B is left out: the bundle has no autoregressive drafter" in result.out
    assert "Every mode gave plain decoding's tokens on all 3 prompts." in result.out
    assert lines[-1] == f"report: {tmp_path / 'report'}"
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["report.html", "report.json", "rows.csv"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["asked.jsonl", "report"]


def test_json_is_what_the_report_holds(spoken: Spoken, asked: Path, tmp_path: Path) -> None:
    result = bench(spoken, "--prompts", asked, "--groups", "a,D", "--repeats", 2, "--output", tmp_path / "out", "--json").assert_done()
    values = json.loads(result.out)
    assert result.err == ""
    assert values == json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert list(values["modes"]) == ["plain", "steps1-k1"]
    assert len(values["jobs"]) == 2 * 2 * 3
    assert {job["output_tokens"] for job in values["jobs"]} == {5}
    assert values["settings"]["repeats"] == 2
    assert values["subject"]["backend"] == "ort-cpu"
    with (tmp_path / "out" / "rows.csv").open(encoding="utf-8", newline="") as file:
        assert [row["job"] for row in csv.DictReader(file)] == [job["job"] for job in values["jobs"]]


def test_report_holds_no_place_of_this_machine(spoken: Spoken, asked: Path, tmp_path: Path) -> None:
    bench(spoken, "--prompts", asked, "--groups", "A", "--output", tmp_path / "out").assert_done()
    for path in (tmp_path / "out").iterdir():
        content = path.read_text(encoding="utf-8")
        assert str(spoken.bundle.parent) not in content
        assert str(Path.home()) not in content


def test_at_a_temperature_a_seed_gives_the_same_tokens_again(spoken: Spoken, asked: Path) -> None:
    def outputs(seed: int) -> list[list[int]]:
        options = ("--groups", "A,D", "--temperature", 1.5, "--seed", seed, "--json")
        values = json.loads(bench(spoken, "--prompts", asked, *options).assert_done().out)
        assert all(figures["figures"]["num_same_tokens"] is None for figures in values["modes"].values())
        return [job["output"] for job in values["jobs"]]

    assert outputs(3) == outputs(3) != outputs(4)


def test_built_in_sets_by_name(spoken: Spoken, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tiny bundle has no room for real prompts.
    monkeypatch.setattr(Session, "encode", lambda *_arguments, **_variables: [1, 2, 3])
    values = json.loads(bench(spoken, "--set", "code", "--set", "math", "--num-prompts", 1, "--groups", "A", "--json").assert_done().out)
    assert [prompt["name"] for prompt in values["prompts"]] == ["code-001", "math-001"]


def test_missed_thresholds_are_exit_code_1_after_the_report_is_written(spoken: Spoken, asked: Path, tmp_path: Path) -> None:
    options = ("--prompts", asked, "--groups", "A,L,D", "--output", tmp_path / "out")
    result = bench(spoken, *options, "--fail-under-speedup", 1000)
    assert result.exit_code == 1
    last = result.err.splitlines()[-1]
    assert last.startswith("xpress-export: speed-up of group D is ")
    assert last.endswith("expected at least 1000 (--fail-under-speedup)")
    assert (tmp_path / "out" / "report.html").is_file()


def test_thresholds_are_about_the_group_that_was_named(spoken: Spoken, asked: Path) -> None:
    options = ("--prompts", asked, "--groups", "A,L", "--fail-group", "L", "--json")
    bench(spoken, *options, "--fail-under-tau", 0.5).assert_done()
    result = bench(spoken, *options, "--fail-under-tau", 50)
    assert result.exit_code == 1
    assert result.err.startswith("xpress-export: τ of group L is ")
    json.loads(result.out)


def test_peak_memory_of_each_mode_comes_from_a_process_of_its_own(spoken: Spoken, asked: Path) -> None:
    values = json.loads(bench(spoken, "--prompts", asked, "--groups", "A", "--memory", "--json").assert_done().out)
    alone, together = values["modes"]["plain"]["peak_memory"], values["peak_memory"]
    assert 0 < alone["host_bytes"] < together["host_bytes"]
    assert alone["device_bytes"] is together["device_bytes"] is None


def test_a_mode_whose_memory_cannot_be_measured_costs_a_note(spoken: Spoken, asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_WORKER", (memory.sys.executable, "-c", "raise SystemExit('out of luck')"))
    values = json.loads(bench(spoken, "--prompts", asked, "--groups", "A", "--memory", "--json").assert_done().out)
    (note,) = (note for note in values["notes"] if "peak memory" in note)
    assert note == "The peak memory of A: plain was not measured: the process that measured plain ended with 1: out of luck."


def test_what_the_memory_process_refuses_is_told(tmp_path: Path) -> None:
    mode = Mode("plain", "plain", ("A",), GenerationConfig(5, speculation="off"))
    with pytest.raises(EnvironmentProblem, match="is not a bundle folder"):
        memory.measure_memory(tmp_path / "absent", "ort-cpu", None, None, [1], mode)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Ctrl-C in the generation of that number."""
    calls = iter(range(1, number + 1))
    generate = Session.generate

    def generate_or_stop(self: Session, *arguments: Any) -> GenerationResult:
        if next(calls) == number:
            raise KeyboardInterrupt
        return generate(self, *arguments)

    monkeypatch.setattr(Session, "generate", generate_or_stop)


@pytest.mark.parametrize("number", [1, 5])
def test_interrupted_it_leaves_no_report(spoken: Spoken, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    interrupt_at(monkeypatch, number)
    result = bench(spoken, "--prompts", asked, "--groups", "A,D", "--output", tmp_path / "out", "--json")
    assert (result.exit_code, result.out, result.err.strip()) == (130, "", "xpress-export: interrupted")
    assert [path.name for path in tmp_path.iterdir()] == ["asked.jsonl"]


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement that begins is a failure."""
    monkeypatch.setattr(measure, "measure", lambda *_arguments, **_options: pytest.fail("the measurement began"))
    monkeypatch.setattr("xpress_export.bench.run.measure", measure.measure)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--temperature", "nan"), ("temperature is nan", "expected a number of 0 or from 1e-6 to 100")),
        (("--temperature", "-1"), ("temperature is -1.0",)),
        (("--top-p", "0"), ("top_p is 0.0", "over 0 and at most 1")),
        (("--top-p", "1.5"), ("top_p is 1.5",)),
        (("--top-k", "0"), ("top_k is 0",)),
        (("--seed", "-3"), ("seed is -3",)),
        (("--repeats", "0"), ("--repeats", "0")),
        (("--max-new-tokens", "1"), ("--max-new-tokens", "1")),
        (("--num-prompts", "0"), ("--num-prompts", "0")),
        (("--num-prompts", "2"), ("--num-prompts is 2, and long has 1 prompts",)),
        (("--groups", "A,Z"), ("group 'Z' does not exist", *GROUPS)),
        (("--groups", ""), ("group '' does not exist",)),
        (("--steps", "0"), ("--steps is 0",)),
        (("--steps", "-5"), ("--steps is -5",)),
        (("--steps", "1,x"), ("--steps", "1,x")),
        (("--many-steps", "0"), ("--many-steps is 0",)),
        (("--num-passes", "9"), ("num_passes is 9", "built for")),
        (("--num-passes", "0"), ("--num-passes is 0",)),
        (("--shortlist", "77"), ("shortlist is 77",)),
        (("--groups", "A,D", "--steps", "1,2"), ("--steps is for group ablation, which --groups A,D leaves out",)),
        (("--groups", "A,D", "--many-steps", "4"), ("--many-steps is for group C",)),
        (("--groups", "A,L", "--num-passes", "1"), ("--num-passes is for group D or ablation or auto",)),
        (("--fail-under-speedup", "nan"), ("--fail-under-speedup is nan, expected a number over 0",)),
        (("--fail-under-tau", "-1"), ("--fail-under-tau is -1",)),
        (("--fail-under-tau", "inf"), ("--fail-under-tau is inf",)),
        (("--fail-under-tau", "2", "--groups", "A,L"), ("--fail-under-tau is about group D, which is not measured", "--fail-group")),
        (("--fail-under-tau", "2", "--fail-group", "B"), ("about group B, which is not measured",)),
        (("--fail-group", "L"), ("--fail-group needs --fail-under-speedup or --fail-under-tau",)),
        (("--fail-group", "A"), ("--fail-group", "A")),
        (("--set", "math"), ("--set math", "leave one of them out")),
        (("--set", "poetry"), ("poetry", "math")),
        (("--backend", "bogus"), ("bogus",)),
        (("--threads", "0"), ("--threads",)),
        (("--bogus",), ("--bogus",)),
    ],
)
def test_bad_options_are_one_line_before_anything_is_measured(
    spoken: Spoken, asked: Path, tmp_path: Path, options: Sequence[str], named: Sequence[str]
) -> None:
    invoke("bench", spoken.bundle, "--prompts", asked, "--output", tmp_path / "out", *options).assert_refused(2, *named)
    assert [path.name for path in tmp_path.iterdir()] == ["asked.jsonl"]


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", ("holds no prompts",)),
        ("\n\n", ("holds no prompts",)),
        ('{"prompt": "Why?"}\n\n{"prompt": ', ("line 3", "is not a JSON object")),
        ('{"prompt": "Why?"}\n{"tokens": [5000]}', ("line 2 (family mine)", "5000", "from 0 to 429")),
        ('{"prompt": "\\ud800"}', ("line 1", "surrogate")),
        (
            '{"prompt": "Why?"}\n' + json.dumps({"prompt": "long " * 200, "family": "novel"}),
            ("line 2 (family novel)", "capacity is 128", "shorten it"),
        ),
    ],
)
def test_bad_prompt_files_are_one_line_before_anything_is_measured(
    spoken: Spoken, tmp_path: Path, content: str, named: Sequence[str]
) -> None:
    (tmp_path / "mine.jsonl").write_text(content, encoding="utf-8")
    invoke("bench", spoken.bundle, "--prompts", tmp_path / "mine.jsonl").assert_refused(2, *named)


@pytest.mark.usefixtures("nothing_runs")
def test_outputs_and_bundles_that_cannot_be_used(spoken: Spoken, asked: Path, tmp_path: Path) -> None:
    options = ("--prompts", asked)
    bench(spoken, "--prompts", tmp_path / "absent").assert_refused(2, "cannot be read: No such file")
    bench(spoken, *options, "--output", tmp_path).assert_refused(2, "exists already and is not replaced", "give another --output")
    bench(spoken, *options, "--output", asked).assert_refused(2, "is a file")
    bench(spoken, *options, "--output", asked / "out").assert_refused(2, "is not a folder")
    bench(spoken, *options, "--output", spoken.bundle).assert_refused(2, "exists already and is not replaced")
    invoke("bench", tmp_path / "absent", *options).assert_refused(2, "is not a bundle folder")


def test_choices_of_the_command_line_are_those_of_the_package() -> None:
    choices = {parameter.name: parameter.type.choices for parameter in command.params if isinstance(parameter.type, click.Choice)}
    assert choices == {"sets": BUILT_IN_SETS, "fail_group": SINGLE_GROUPS}
    (groups,) = (parameter for parameter in command.params if parameter.name == "groups")
    assert isinstance(groups, click.Option)
    assert all(group in str(groups.help) for group in GROUPS)
