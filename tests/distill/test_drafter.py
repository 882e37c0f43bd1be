"""The drafter as it is trained, against the equations and against what the published implementations computed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from examples.distill.batches import FeatureSet
from examples.distill.drafter import READOUT, TrainedDrafter
from examples.distill.replay import replay
from examples.distill.run_folder import RunFolder
from examples.distill.settings import DrafterSettings, Settings, TrainingSettings
from examples.distill.sizes import Sizes, drafter_sizes
from examples.distill.tables import DraftVocabulary, TargetTables
from examples.distill.target import Target
from examples.distill.train import write_drafter
from examples.distill.warm_start import begin
from tests.distill.runs import features_of
from tests.reference import ReferenceDrafter
from tests.tiny import write_drafter as write_random_drafter
from tests.tiny import write_target
from xpress_export.checkpoints import open_drafter

DATA = Path(__file__).parents[1] / "conformance_data"
NUM_TOKENS = 40


def settings_of(target: Path, drafter: Path, **training: Any) -> Settings:
    """The settings whose drafter has the sizes of a folder in the serving format."""
    config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
    return Settings.model_validate(
        {
            "target": {"checkpoint": str(target)},
            "features": {"cache": "float16"},
            "drafter": {
                "num_layers": config["num_hidden_layers"],
                "block_size": config["block_size"],
                "mask_token_id": config["dflash_config"]["mask_token_id"],
                "tap_layers": config["dflash_config"]["target_layer_ids"],
                "intermediate_size": config["intermediate_size"],
                "num_heads": config["num_attention_heads"],
                "num_kv_heads": config["num_key_value_heads"],
                "head_dim": config["head_dim"],
                "refiner_rank": config.get("xpress_rank", 0),
                "refiner_mlp_hidden": config.get("xpress_mlp_hidden", 1),
                "num_passes": config.get("xpress_num_passes", 0),
            },
            "training": {"warm_start": str(drafter), "tv_weight": 0.0} | training,
        }
    )


def opened(settings: Settings) -> tuple[TrainedDrafter, TargetTables, Sizes]:
    target = Target(settings.target)
    sizes = drafter_sizes(settings.drafter, target.checkpoint.config, {})
    drafter = TrainedDrafter(sizes).eval()
    begin(drafter, settings.training, target, lambda _: None)
    tables = TargetTables(target.checkpoint.embedding().table.detach(), target.checkpoint.head().table.detach())
    return drafter, tables, sizes


@torch.no_grad()
def test_blocks_of_a_sequence_equal_the_equations(tiny_folders: tuple[Path, Path]) -> None:
    """Hidden states and refined logits of several blocks at once, within 1e-4."""
    drafter, tables, sizes = opened(settings_of(*tiny_folders))
    reference = ReferenceDrafter(tiny_folders[1], tables.embedding, tables.head)
    taps = torch.randn(1, 20, len(sizes.tap_layers) * sizes.hidden_size)
    anchors = torch.tensor([[1, 7, 20]])
    anchor_tokens, previous = [5, 11, 17], [[3, 5, 8, 13], [2, 11, 1, 6], [9, 17, 4, 30]]
    shown = torch.tensor([[[token] + [sizes.mask_token_id] * (sizes.block_size - 1) for token in anchor_tokens]])
    hidden = drafter.backbone(taps, tables.embedding[shown], anchors)
    assert drafter.head is not None
    refined = hidden[..., 1:, :] @ tables.head.T + drafter.head.bias(drafter.head(hidden, torch.tensor([previous])), None)
    for index, anchor in enumerate(anchors[0].tolist()):
        expected = reference.hidden(taps[0, :anchor], anchor_tokens[index])
        torch.testing.assert_close(hidden[0, index], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(refined[0, index], reference.refined_logits(expected, previous[index]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["qwen3-b4", "llama-b8"])
def test_replay_equals_the_published_rounds(case: str, tmp_path: Path) -> None:
    """As many rounds for every prompt and number of passes, through cached features and a warm start."""
    prompts: list[dict[str, Any]] = json.loads((DATA / case / "expected.json").read_text(encoding="utf-8"))["prompts"]
    settings = settings_of(DATA / case / "target", DATA / case / "xpress")
    folder = RunFolder(tmp_path)
    features_of(settings, folder, [(prompt["prompt"], prompt["plain"]) for prompt in prompts])
    drafter, tables, _ = opened(settings)
    passes = [int(number) for number in prompts[0]["by_passes"]]
    for index, (prompt, sequence) in enumerate(zip(prompts, FeatureSet(folder, "train").all(), strict=True)):
        found = replay(drafter, tables, [sequence], passes)
        for number in passes:
            # They go on behind the 40 tokens; the first token is prefill's.
            ends = itertools.accumulate(prompt["by_passes"][str(number)]["acceptance_lengths"])
            needed = next(count for count, end in enumerate(ends, start=1) if end >= NUM_TOKENS - 1)
            assert found[number].rounds == needed, (index, number)
            assert found[number].tokens == NUM_TOKENS - 1


def test_written_folder_is_what_was_read(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    """From a folder and back, in half precision; the exporter takes it."""
    drafter, _, sizes = opened(settings_of(*tiny_folders))
    write_drafter(drafter, None, RunFolder(tmp_path))
    before, after = load_file(tiny_folders[1] / "model.safetensors"), load_file(tmp_path / "drafter" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor.half()), name
    config = open_drafter(str(tmp_path / "drafter")).config
    assert (config.block_size, config.mask_token_id, config.tap_layers) == (sizes.block_size, sizes.mask_token_id, sizes.tap_layers)


def test_reduced_vocabulary_is_written_and_begun_with(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The exporter finds the tokens and their rows; a warm start puts each row back where its token is, and the others correct nothing."""
    settings = settings_of(*tiny_folders)
    drafter, tables, _ = opened(settings)
    drafted = DraftVocabulary(torch.tensor([3, 4, 9, 40]), tables.head[[3, 4, 9, 40]])
    write_drafter(drafter, drafted, RunFolder(tmp_path))
    checkpoint = open_drafter(str(tmp_path / "drafter"))
    assert checkpoint.config.draft_vocab_size == 4
    assert checkpoint.draft_token_ids is not None and checkpoint.draft_token_ids.tolist() == [3, 4, 9, 40]
    torch.testing.assert_close(checkpoint.own_head_table(), drafted.head.half().float())
    training = settings.training.model_copy(update={"warm_start": str(tmp_path / "drafter")})
    state = opened(settings.model_copy(update={"training": training}))[0].serving_state()
    for name, tensor in drafter.serving_state().items():
        expected = tensor.half().float()
        if name == READOUT:
            expected[[token for token in range(len(expected)) if token not in (3, 4, 9, 40)]] = 0
        assert torch.equal(state[name], expected), name


def test_bare_drafter_gets_a_head_that_corrects_nothing_yet(tmp_path: Path) -> None:
    write_target(tmp_path / "target", "qwen3")
    write_random_drafter(tmp_path / "bare", tmp_path / "target", refiner=False)
    settings = settings_of(tmp_path / "target", tmp_path / "bare")
    head = {"refiner_rank": 8, "refiner_mlp_hidden": 16, "num_passes": None}
    settings = settings.model_copy(update={"drafter": settings.drafter.model_copy(update=head)})
    drafter, _, _ = opened(settings)
    assert drafter.head is not None
    update = drafter.head(torch.randn(1, 4, 40), torch.zeros(1, 4, dtype=torch.long))
    assert torch.equal(drafter.head.bias(update, None), torch.zeros(1, 3, 61))


def test_layers_of_the_target(tmp_path: Path) -> None:
    """Spread over the target, its last one last."""
    model = write_target(tmp_path, "qwen3", num_hidden_layers=4)
    settings = Settings.model_validate(
        {
            "target": {"checkpoint": str(tmp_path)},
            "drafter": {"num_layers": 2, "block_size": 4, "mask_token_id": 3, "tap_layers": [0, 2], "refiner_rank": 8},
            "training": {"warm_start": "target"},
        }
    )
    state = opened(settings)[0].serving_state()
    for ours, theirs in ((0, 1), (1, 3)):
        for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
            expected: Tensor = model.model.layers[theirs].get_parameter(name)
            assert torch.equal(state[f"layers.{ours}.{name}"], expected), name


def test_random_beginnings_depend_on_the_seed(tiny_folders: tuple[Path, Path]) -> None:
    settings = settings_of(*tiny_folders)
    states = []
    for seed in (0, 0, 1):
        training = TrainingSettings(seed=seed)
        states.append(opened(settings.model_copy(update={"training": training}))[0].serving_state()["fc.weight"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_default_taps_are_spread_as_dflash_spreads_them() -> None:
    from examples.distill.sizes import tap_layers

    assert tap_layers(DrafterSettings(num_layers=5), 36) == (1, 9, 17, 25, 33)
