"""Engines of the demo, built as a CI job without a GPU builds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.invoke import invoke
from xpress_export.demo.target import demo_drafter
from xpress_runtime.bundle import Bundle
from xpress_runtime.engines import open_engines

MAX_PEAK_BYTES = 4 << 30


@pytest.mark.slow
def test_build_with_engines(demo_target: Path, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    sizes = ("--num-passes", "2,1", "--capacity", "1024")
    command = ("build", "--target", demo_target, "--drafter", demo_drafter(), "--output", output, *sizes)
    invoke(*command, "--engine", "tensorrt-rtx", "--no-parity").assert_done()

    bundle = Bundle.open(output)
    manifest = open_engines(bundle, "tensorrt-rtx").manifest
    assert set(manifest.engines) == set(bundle.manifest.graph_set("fp16-mask").graphs)
    assert manifest.profile.calls == {"prefill": (1, 128), "verify": (1, 8), "single": (1, 1)}
    for rows, tokens in manifest.profile.calls.values():
        shape = (rows, tokens, bundle.manifest.target.hidden_size)
        assert manifest.engines["target"].profile_for({"embeddings": shape, "position": (rows,), **_caches(bundle, rows)}) is not None
    assert manifest.peak_build_bytes is None or manifest.peak_build_bytes < MAX_PEAK_BYTES
    shown = json.loads(invoke("inspect", output, "--json").assert_done().out)
    assert set(shown["engines"]["tensorrt-rtx"]["engines"]) == set(manifest.engines)


def _caches(bundle: Bundle, rows: int) -> dict[str, tuple[int, ...]]:
    caches = bundle.manifest.target.caches
    shape = (rows, caches.num_kv_heads, bundle.manifest.cache_rows, caches.head_dim)
    return {f"{kind}_cache.{layer}": shape for kind in ("key", "value") for layer in range(caches.num_layers)}
