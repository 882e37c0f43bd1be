"""What the groups mean for a bundle, and what happens where they coincide or the bundle lacks something."""

from __future__ import annotations

import pytest

from tests.bench.synthetic import manifest
from xpress_export.bench.modes import GROUPS, ModePlan, plan_modes
from xpress_runtime.errors import OptionError
from xpress_runtime.generation import GenerationConfig

BASE = GenerationConfig(32, temperature=0.7, seed=5)


def configs(plan: ModePlan, group: str) -> list[tuple[str, str, int, int | None]]:
    return [(m.config.speculation, m.config.drafter, m.config.draft_steps, m.config.num_passes) for m in plan.of_group(group)]


def test_groups_are_what_the_experiment_names() -> None:
    plan = plan_modes(manifest(), BASE, many_steps=6)
    assert configs(plan, "A") == [("off", "block", 1, None)]
    assert configs(plan, "B") == [("on", "autoregressive", 1, None)]
    assert configs(plan, "L") == [("on", "lookup", 1, None)]
    assert configs(plan, "C") == [("on", "block", 6, 0)]
    assert configs(plan, "D") == [("on", "block", 1, 2)]
    assert configs(plan, "auto") == [("auto", "block", 1, 2)]
    assert configs(plan, "sweep") == [("on", "block", 1, 2), ("on", "block", 1, 0), ("on", "block", 1, 1), ("on", "block", 1, 4)]


def test_every_mode_has_the_same_limits_and_sampling() -> None:
    for mode in plan_modes(manifest(), BASE).modes:
        assert (mode.config.max_new_tokens, mode.config.temperature, mode.config.seed) == (32, 0.7, 5)


def test_plain_comes_first_and_is_always_there() -> None:
    assert [mode.name for mode in plan_modes(manifest(), BASE, groups=["auto"]).modes] == ["plain", "auto"]


def test_ablation_crosses_steps_with_refiner_on_and_off() -> None:
    plan = plan_modes(manifest(), BASE, groups=["ablation"], steps=(3, 1))
    assert sorted(configs(plan, "ablation")) == [("on", "block", 1, 0), ("on", "block", 1, 2), ("on", "block", 3, 0), ("on", "block", 3, 2)]


def test_coinciding_modes_are_one_mode_of_several_groups() -> None:
    plan = plan_modes(manifest(), BASE, groups=["C", "D", "ablation", "sweep"], steps=(1, 5), many_steps=5)
    names = [mode.name for mode in plan.modes]
    assert len(names) == len(set(names)) == len({mode.label for mode in plan.modes}) == 7
    groups = {mode.name: mode.groups for mode in plan.modes}
    assert groups["steps1-k2"] == ("D", "ablation", "sweep")
    assert groups["steps5-k0"] == ("C", "ablation")
    assert len({repr(mode.config) for mode in plan.modes}) == len(names)


def test_more_steps_than_slots_are_as_many_as_slots_and_said_so() -> None:
    plan = plan_modes(manifest(), BASE, groups=["C", "ablation"], steps=(7, 10), many_steps=20)
    assert {mode.config.draft_steps for mode in plan.of_group("ablation")} == {7}
    assert plan.of_group("C")[0] in plan.of_group("ablation")
    assert plan.notes == (
        "A block has 7 slots to fill, so 20 denoising steps are 7.",
        "A block has 7 slots to fill, so 10 denoising steps are 7.",
    )


def test_without_an_autoregressive_drafter_group_b_is_left_out_and_said_so() -> None:
    plan = plan_modes(manifest(draft_model=None), BASE)
    assert plan.of_group("B") == []
    assert any("Group B is left out: the bundle has no autoregressive drafter" in note for note in plan.notes)


def test_without_a_refiner_what_refines_is_left_out_and_said_so() -> None:
    plan = plan_modes(manifest(num_passes=(0,)), BASE)
    assert plan.of_group("D") == []
    assert {mode.config.num_passes for mode in plan.of_group("ablation")} == {0}
    assert plan.of_group("C") != []
    assert "Group D is left out: the bundle has no refiner." in plan.notes
    assert "The refined half of the ablation is left out: the bundle has no refiner." in plan.notes


def test_passes_and_shortlist_reach_every_refined_mode_and_no_other() -> None:
    plan = plan_modes(manifest(), BASE, num_passes=4, shortlist=256)
    assert plan.of_group("D")[0].config.num_passes == 4
    assert plan.of_group("auto")[0].config.num_passes == 4
    for mode in plan.modes:
        assert mode.config.shortlist == (256 if mode.config.num_passes else None), mode.name


def test_titles_carry_the_letters_of_the_groups() -> None:
    titles = [mode.title for mode in plan_modes(manifest(), BASE).modes]
    assert titles[:6] == ["A: plain", "B: autoregressive drafter", "L: prompt lookup", "C: 7 steps, no refiner", "D: 1 step, K=2", "auto"]
    assert "1 step, no refiner" in titles


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"groups": ["A", "Z"]}, "group 'Z' does not exist; choose among A, B, L, C, D"),
        ({"groups": [""]}, "group '' does not exist"),
        ({"steps": (5, 0)}, "--steps is 0, expected numbers of denoising steps from 1"),
        ({"steps": (2000,)}, "--steps is 2000"),
        ({"many_steps": -1}, "--many-steps is -1"),
        ({"num_passes": 0}, "--num-passes is 0, which is no refinement"),
    ],
)
def test_what_cannot_be_planned(options: dict[str, object], named: str) -> None:
    with pytest.raises(OptionError) as refused:
        plan_modes(manifest(), BASE, **options)  # type: ignore[arg-type]
    assert named in str(refused.value)


def test_every_group_is_explained() -> None:
    assert all(GROUPS.values())
