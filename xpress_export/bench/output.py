"""Writing a report as a folder: ``report.html`` for people, ``report.json`` for programs, ``rows.csv`` with one row for each generation.

The folder is made before the measurement, so that a place that cannot be written is known at once, and appears under its name when it is
complete.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xpress_export.bench.page import render_page
from xpress_export.bench.report import Report, job_rows
from xpress_export.staging import staged_folder
from xpress_runtime.errors import OutputError

REPORT_HTML, REPORT_JSON, ROWS_CSV = "report.html", "report.json", "rows.csv"
_ADVICE = "give another --output"
_NEEDED_BYTES = 32_000_000


@contextmanager
def report_folder(output: Path) -> Iterator[Path]:
    """A fresh folder that becomes ``output`` when the block ends without an exception. An older report is never replaced: OutputError."""
    _refuse_content(output)
    with staged_folder(output, needed_bytes=_NEEDED_BYTES, replace=True, advice=_ADVICE) as folder:
        yield folder
        # Hours may have passed.
        _refuse_content(output)


def write_report(report: Report, folder: Path) -> None:
    """Write all three files."""
    (folder / REPORT_JSON).write_text(json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (folder / REPORT_HTML).write_text(render_page(report), encoding="utf-8")
    rows = job_rows(report.measurements)
    with (folder / ROWS_CSV).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _refuse_content(output: Path) -> None:
    """An empty folder may become the report; anything else stays."""
    try:
        taken = output.is_dir() and any(output.iterdir())
    except OSError as problem:
        raise OutputError(f"{output} cannot be written: {problem.strerror}; {_ADVICE}") from None
    if taken:
        raise OutputError(f"{output} exists already and is not replaced; {_ADVICE}")
