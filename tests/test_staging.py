"""A staged folder appears whole or not at all, and never over something that came in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpress_export.staging import staged_folder
from xpress_runtime.errors import OutputError


def test_what_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with pytest.raises(OutputError, match="exists already"), staged_folder(output, needed_bytes=0, replace=False) as staging:
        (staging / "bundle.json").write_text("{}", encoding="utf-8")
        output.mkdir()
        (output / "thesis.txt").write_text("precious", encoding="utf-8")
    assert (output / "thesis.txt").read_text(encoding="utf-8") == "precious"
    assert list(tmp_path.iterdir()) == [output]


def test_a_foreign_file_that_appears_meanwhile_is_kept_even_with_replace(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    with pytest.raises(OutputError), staged_folder(output, needed_bytes=0, replace=True) as staging:
        (staging / "bundle.json").write_text("{}", encoding="utf-8")
        (output / "thesis.txt").write_text("precious", encoding="utf-8")
    assert (output / "thesis.txt").read_text(encoding="utf-8") == "precious"
    assert list(tmp_path.iterdir()) == [output]
