"""The report as data: finite JSON, one row for each generation, what it says in words, and thresholds."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.bench.synthetic import job, made_up, manifest, prompts, report, result
from xpress_export.bench.figures import Measurements
from xpress_export.bench.findings import Threshold, findings, require_thresholds
from xpress_export.bench.memory import PeakMemory
from xpress_export.bench.modes import ModePlan, plan_modes
from xpress_export.bench.output import report_folder, write_report
from xpress_export.bench.report import Report, job_rows
from xpress_runtime.errors import CheckFailed, OutputError
from xpress_runtime.generation import GenerationConfig

# The figures that one log row of a job must have.
LOGGED = {"job", "input_tokens", "draft_ms", "refine_ms", "verify_ms", "accepted_tokens", "output_tokens", "status"}


def two_modes(verify_ms: float) -> tuple[ModePlan, Report]:
    """Plain decoding of 10 ms a token, and D with rounds of four tokens, which take 2 ms more and less by turns."""
    plan = plan_modes(manifest(), GenerationConfig(64), groups=["A", "D"])
    asked = prompts(["x"], each=12)
    jobs = []
    for index, prompt in enumerate(asked):
        jobs += [job(prompt, plan.modes[0], result([1] * 8, num_proposals=0, verify_ms=10))]
        jobs += [job(prompt, plan.modes[1], result([4, 4], verify_ms=verify_ms + (2 if index % 2 else -2)))]
    return plan, report(asked, measurements=Measurements(asked, plan.modes, jobs), plan=plan)


def test_json_holds_every_mode_family_prompt_and_generation() -> None:
    made = report(prompts(each=3), memory_of_modes={"plain": PeakMemory(1_000_000, None)})
    values = json.loads(json.dumps(made.to_json(), allow_nan=False))
    assert len(values["jobs"]) == 9 * len(values["modes"]) == 9 * 12
    assert set(values["modes"]["steps1-k2"]["families"]) == {"math", "code", "chat"}
    assert values["modes"]["steps1-k2"]["groups"] == ["D", "ablation", "sweep"]
    assert values["modes"]["plain"]["peak_memory"] == {"host_bytes": 1_000_000, "device_bytes": None}
    assert values["modes"]["auto"]["peak_memory"] is None
    assert values["peak_memory"]["host_bytes"] == 750_000_000
    assert len(values["prompts"]) == 9
    one = values["jobs"][0]
    assert len(one["output"]) == one["output_tokens"]
    assert sum(one["acceptance_lengths"]) == one["output_tokens"] - 1


def test_rows_are_in_the_order_of_the_run_and_complete() -> None:
    plan = plan_modes(manifest(), GenerationConfig(64), groups=["A", "D"])
    asked = prompts(["x"], each=2)
    jobs = made_up(plan, asked, repeats=2)
    rows = job_rows(Measurements(asked, plan.modes, jobs))
    assert [row["job"] for row in rows] == [each.name for each in jobs]
    assert set(rows[0]) >= LOGGED
    for row in rows:
        assert row["decode_ms"] == pytest.approx(row["draft_ms"] + row["refine_ms"] + row["verify_ms"] + row["host_ms"])


def test_a_row_is_compared_with_plain_decoding_of_its_own_prompt_and_repeat() -> None:
    plan, made = two_modes(16)
    row = job_rows(made.measurements)[1]
    assert row["mode"] == plan.modes[1].name
    assert row["speedup"] == pytest.approx(40 / 14)
    assert row["same_tokens"] is True
    assert row["status"] == "length"


@pytest.mark.parametrize(
    ("verify_ms", "verdict"),
    [
        (32.0, "faster than plain decoding: 1.25 ×"),
        (48.0, "slower than plain decoding: 0.83 ×"),
        (40.0, "too close to plain decoding to call"),
    ],
)
def test_a_gain_or_a_loss_is_claimed_only_where_the_interval_shows_it(verify_ms: float, verdict: str) -> None:
    _, made = two_modes(verify_ms)
    assert verdict in findings(made)[0]
    assert "It keeps 4.00 tokens a round" in findings(made)[0]


def test_findings_answer_the_questions_of_the_experiment() -> None:
    text = "\n".join(findings(report(prompts(each=10))))
    assert "Fewer steps: without refiner, τ goes from" in text
    assert "Refiner: after one step, τ goes from" in text
    assert "Beside 7 steps without refiner, τ differs by" in text
    assert "Every mode gave plain decoding's tokens on all 30 prompts." in text


def test_findings_without_the_modes_they_need_are_left_out() -> None:
    text = "\n".join(findings(report(groups=["A", "L"])))
    assert "Fewer steps" not in text
    assert "Refiner" not in text


def test_other_tokens_than_plain_decodings_are_shouted() -> None:
    plan, _ = two_modes(32)
    asked = prompts(["x"], each=2)
    plain, other = result([1] * 4, num_proposals=0), result([4], tokens=(9,) * 5)
    jobs = [job(asked[0], plan.modes[0], plain), job(asked[0], plan.modes[1], other)]
    jobs += [job(asked[1], plan.modes[0], plain), job(asked[1], plan.modes[1], result([4]))]
    text = "\n".join(findings(report(asked, measurements=Measurements(asked, plan.modes, jobs), plan=plan)))
    assert "OTHER TOKENS THAN PLAIN DECODING'S: D: 1 step, K=2 on 1 of 2 prompts" in text
    assert "With 2 prompts, intervals are rough" in text


def test_sampled_runs_do_not_claim_equal_tokens() -> None:
    text = "\n".join(findings(report(temperature=1.0)))
    assert "in distribution, not token by token" in text
    assert "plain decoding's tokens" not in text


def threshold(figure: str, at_least: float) -> Threshold:
    return Threshold("--fail-under-speedup" if figure == "speed-up" else "--fail-under-tau", figure, "D", at_least)


def test_thresholds_pass_at_the_value_and_fail_above_it() -> None:
    _, made = two_modes(32)
    require_thresholds(made, [threshold("speed-up", 1.249), threshold("τ", 4.0)])
    with pytest.raises(CheckFailed, match=r"speed-up of group D is 1.250, expected at least 1.26 \(--fail-under-speedup\)"):
        require_thresholds(made, [threshold("speed-up", 1.26), threshold("τ", 4.0)])
    with pytest.raises(CheckFailed, match=r"speed-up of group D is .*; τ of group D is 4.000, expected at least 4.1"):
        require_thresholds(made, [threshold("speed-up", 2), threshold("τ", 4.1)])


def test_no_figure_misses_a_threshold() -> None:
    plan, _ = two_modes(32)
    asked = prompts(["x"], each=1)
    jobs = [job(asked[0], plan.modes[0], result([], num_proposals=0)), job(asked[0], plan.modes[1], result([]))]
    made = report(asked, measurements=Measurements(asked, plan.modes, jobs), plan=plan)
    with pytest.raises(CheckFailed, match="speed-up of group D is no figure"):
        require_thresholds(made, [threshold("speed-up", 0.1)])


# The folder.


def test_folder_holds_page_data_and_rows(tmp_path: Path) -> None:
    made = report()
    with report_folder(tmp_path / "new" / "out") as folder:
        write_report(made, folder)
        assert not (tmp_path / "new" / "out").exists()
    out = tmp_path / "new" / "out"
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "report.json", "rows.csv"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]
    with (out / "rows.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(made.measurements.jobs)
    assert set(rows[0]) >= LOGGED
    assert json.loads((out / "report.json").read_text(encoding="utf-8"))["format_version"] == 1


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, interruption: type[BaseException]) -> None:
    def interrupted() -> None:
        with report_folder(tmp_path / "out") as folder:
            write_report(report(), folder)
            raise interruption

    with pytest.raises(interruption):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def refused(output: Path) -> str:
    with pytest.raises(OutputError) as problem, report_folder(output):
        pytest.fail("the measurement began")
    return str(problem.value)


def test_places_that_cannot_be_written_are_refused_before_the_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refused(tmp_path / "file")
    assert "is not a folder" in refused(tmp_path / "file" / "out")
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    assert "is a link" in refused(tmp_path / "link")


def test_an_older_report_or_anything_else_is_never_replaced(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "report.html").write_text("mine")
    message = refused(old)
    assert "exists already and is not replaced; give another --output" in message
    assert "--force" not in message
    assert (old / "report.html").read_text() == "mine"


def test_an_empty_folder_may_become_the_report(tmp_path: Path) -> None:
    with report_folder(tmp_path) as folder:
        (folder / "report.html").write_text("new")
    assert (tmp_path / "report.html").read_text() == "new"


def test_what_appears_in_the_meantime_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "out"

    def run() -> None:
        with report_folder(output) as folder:
            (folder / "report.html").write_text("new")
            output.mkdir()
            (output / "bundle.json").write_text("someone else's")

    with pytest.raises(OutputError, match="exists already"):
        run()
    assert [path.name for path in output.iterdir()] == ["bundle.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
