"""Checkpoints of real size: how much memory a build takes, and single layers at the full width of an 8B model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from tests.large import QWEN3_8B, TWO_GIGABYTES, write_large_target
from tests.tiny import write_drafter

pytestmark = pytest.mark.slow

# The process builds; its peak is read from the kernel, beginning after all modules are imported.
BUILD = """
import re, sys
from pathlib import Path
import onnxscript, torch.onnx, transformers.models.llama.modeling_llama
from xpress_export.cli.main import cli
def status(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
cli(sys.argv[1:], standalone_mode=False)
print(before, status("VmHWM"))
"""
# Traced graphs, the exporter's modules that load late, and what the allocator keeps.
SLACK_BYTES = 350_000_000


def graph_weights(folder: Path) -> dict[str, int]:
    """Bytes of the large tensors of every graph in a folder."""
    sizes = {}
    for path in folder.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        external = [{entry.key: entry.value for entry in tensor.external_data} for tensor in model.graph.initializer]
        sizes[path.stem] = sum(int(entry["length"]) for entry in external if entry)
    return sizes


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from Linux's /proc")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_peak_memory_of_a_build(precision: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """At most one graph's weights and the largest shard, whatever the whole checkpoint has."""
    write_large_target(tmp_path / "target", TWO_GIGABYTES)
    write_drafter(tmp_path / "drafter", tmp_path / "target", mask_token_id=7, rank=64)
    arguments = ["export", "--target", tmp_path / "target", "--drafter", tmp_path / "drafter", "--output", tmp_path / "graphs"]
    options = ["--precision", precision, "--no-sampling", "--num-passes", "1"]
    ran = subprocess.run([sys.executable, "-c", BUILD, *map(str, arguments), *options], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    before, peak = map(int, ran.stdout.splitlines()[-1].split())
    shards = [path.stat().st_size for path in (tmp_path / "target").glob("*.safetensors")]
    weights = graph_weights(tmp_path / "graphs")
    allowed = before + max(weights.values()) + max(shards) + SLACK_BYTES
    record_property("gigabytes", {"checkpoint": sum(shards) / 1e9, "before": before / 1e9, "peak": peak / 1e9, "allowed": allowed / 1e9})
    assert sum(shards) > 1.8e9
    assert peak <= allowed
    # The bound says something: the target's weights are most of it, and fp32 copies of half-precision weights would not fit.
    assert max(weights.values()) > 0.7 * (peak - before)


def test_single_layers_of_an_8b_model(tmp_path: Path) -> None:
    """One layer of target and drafter at full width, with whole tables, block 16 and rank 256."""
    from click.testing import CliRunner

    from xpress_export.cli.main import cli

    write_large_target(tmp_path / "target", QWEN3_8B | {"num_hidden_layers": 1}, shard_bytes=3_000_000_000)
    sizes = {"intermediate_size": 12288, "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    write_drafter(tmp_path / "drafter", tmp_path / "target", block_size=16, rank=256, tap_layers=(0,), mask_token_id=151669, **sizes)
    arguments = ["export", "--target", tmp_path / "target", "--drafter", tmp_path / "drafter", "--output", tmp_path / "graphs"]
    result = CliRunner().invoke(cli, [*map(str, arguments), "--precision", "fp16", "--no-sampling", "--num-passes", "6", "--json"])
    assert result.exit_code == 0, result.output
    assert {"target", "drafter", "head", "embed", "refiner-k6"} <= set(json.loads(result.output)["graphs"])
    weights = graph_weights(tmp_path / "graphs")
    table = 2 * QWEN3_8B["vocab_size"] * QWEN3_8B["hidden_size"]
    assert weights["embed"] == weights["head"] == table
    layer = 2 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288)
    assert layer <= weights["target"] <= 1.1 * layer
