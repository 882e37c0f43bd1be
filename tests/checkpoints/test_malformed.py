"""Malformed folders by the thousand, made systematically out of good ones: each is refused in one line, or listed with the reason why not.

Through the library every one of them, through the command line one of each kind.
"""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.checkpoints.mutations import Mutation, field_mutations, file_mutations, shard_mutations, tensor_mutations
from tests.cli.conftest import quick_export  # noqa: F401, a fixture
from tests.cli.invoke import invoke, listing
from tests.tiny import write_drafter
from xpress_export.checkpoints import open_pair
from xpress_export.checkpoints.families import FAMILIES
from xpress_runtime.errors import XpressError
from xpress_runtime.sets import AttentionForm

SEED = 7
MIN_MALFORMED = 60


@dataclass(frozen=True)
class Harmless:
    """Fields that may be spoilt in some ways (None: in all) without an error, and why.

    Where ``unchanged``, what is read is the same as before: the field is not read, or says what its absence means. Elsewhere it is another
    model, and a good one as far as anything in the folder can tell.
    """

    fields: tuple[str, ...]
    kinds: tuple[str, ...] | None
    why: str
    unchanged: bool = True
    role: str | None = None


ABSENT = ("dropped", "null")
NUMBERS = ("plus one", "minus one", "half more")
HARMLESS = (
    Harmless(("attention_dropout", "embd_pdrop", "resid_pdrop", "initializer_range", "pretraining_tp"), None, "for training alone"),
    Harmless(("dtype", "transformers_version", "use_cache"), None, "what saved or runs the checkpoint elsewhere"),
    Harmless(("architectures",), None, "a target's model_type says it", role="target"),
    Harmless(("eos_token_id",), None, "generation_config.json says it"),
    Harmless(("_sliding_window_pattern",), None, "transformers writes it and does not read it"),
    Harmless(("max_window_layers",), None, "for windows that are not switched on"),
    Harmless(("original_max_position_embeddings",), None, "for scaled rotary embeddings alone"),
    Harmless(("no_rope_layer_interval",), None, "no_rope_layers says it"),
    Harmless(("no_rope_layers",), ("longer",), "entries behind the last layer are left over from a larger model"),
    Harmless(("use_sliding_window",), ("flipped",), "sliding_window is null"),
    Harmless(("dflash_config",), ("strange field",), "an unknown field that resembles none"),
    Harmless(("rope_parameters", "rope_parameters.full_attention", "rope_parameters.sliding_attention"), (*ABSENT, "empty"), "assumed"),
    Harmless(("rope_parameters.full_attention.rope_theta",), NUMBERS, "no layer of this one is without a window"),
    Harmless(
        (
            *("attention_bias", "mlp_bias", "hidden_act", "hidden_activation", "rms_norm_eps", "tie_word_embeddings", "layer_types"),
            *("use_sliding_window", "use_bidirectional_attention", "no_rope_layers", "query_pre_attn_scalar", "sample_from_anchor"),
            *("rope_theta", "rope_parameters.rope_theta", "rope_parameters.rope_type", "rope_parameters.partial_rotary_factor"),
            *(f"rope_parameters.{kind}.{name}" for kind in ("full_attention", "sliding_attention") for name in ("rope_theta", "rope_type")),
        ),
        ABSENT,
        "the family assumes what it says",
    ),
    Harmless(("attn_logit_softcapping", "final_logit_softcapping"), ("dropped",), "the family assumes what it says"),
    Harmless(("attn_logit_softcapping", "final_logit_softcapping"), ("null", *NUMBERS), "another cap, or none", unchanged=False),
    Harmless(("query_pre_attn_scalar",), NUMBERS, "another scale", unchanged=False),
    Harmless(
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
        (*ABSENT, *NUMBERS),
        "another factor, or 1",
        unchanged=False,
    ),
    Harmless(("max_position_embeddings",), (*ABSENT, "plus one", "minus one"), "another length", unchanged=False),
    Harmless(("sliding_window",), ("dropped", "plus one", "minus one"), "another window", unchanged=False),
    Harmless(
        ("rope_theta", "rope_parameters.rope_theta", "rope_parameters.sliding_attention.rope_theta"),
        NUMBERS,
        "another base",
        unchanged=False,
    ),
    Harmless(("dflash_config.mask_token_id",), ("minus one",), "another token", unchanged=False),
    Harmless(("dflash_config.target_layer_ids",), ABSENT, "bare DFlash may leave it out", unchanged=False),
    Harmless(("num_target_layers",), ABSENT, "the layers to tap are listed", unchanged=False),
    Harmless(("xpress_num_passes",), ("plus one", "minus one"), "any number of passes below the block size runs", unchanged=False),
    Harmless(("block_size",), ("plus one", "minus one"), "no tensor of bare DFlash has its size", unchanged=False),
)


class Case(NamedTuple):
    """Family of the target, format of the drafter, which of the two is spoilt, and how: in all ways, or in its fields alone."""

    family: str
    drafter: str
    role: str
    fields_only: bool = False

    def __str__(self) -> str:
        return f"{self.family}-{self.drafter}-{self.role}"

    def mutations(self, folder: Path) -> list[Mutation]:
        if self.family == "sharded":
            return list(shard_mutations(folder, SEED))
        fields = list(field_mutations(folder))
        return fields if self.fields_only else [*fields, *tensor_mutations(folder, SEED), *file_mutations(folder, SEED)]


# Files are the same in every family, tensors are in most.
LAYOUTS = ("llama", "phi3", "gemma2")
CASES = [
    *(Case(family, "xpress", "target", family not in LAYOUTS) for family in FAMILIES),
    Case("llama", "xpress", "drafter"),
    Case("qwen3", "dflash", "drafter"),
    Case("sharded", "xpress", "target"),
]


@dataclass(frozen=True)
class Outcome:
    """What became of a mutation: the line that refuses it, less the folder's own path; or None, and whether the same was read as before."""

    mutation: Mutation
    message: str | None
    unchanged: bool


@pytest.fixture(scope="session")
def pairs(originals: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """A folder with a good target and a drafter for it."""
    root = tmp_path_factory.mktemp("pairs")

    @functools.cache
    def made(family: str, drafter: str) -> Path:
        folder = root / f"{family}-{drafter}"
        shutil.copytree(originals / family, folder / "target")
        write_drafter(folder / "drafter", folder / "target", refiner=drafter == "xpress")
        return folder

    return lambda case: made(case.family, case.drafter)


@pytest.fixture(scope="session")
def outcomes(pairs: Callable[[Case], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], list[Outcome]]:
    """All mutations of a case through the library, each case once. An exception that is none of ours is a defect and goes through."""

    @functools.cache
    def outcomes(case: Case) -> list[Outcome]:
        good, folder, found = pairs(case), tmp_path_factory.mktemp("spoilt"), []
        before = read_everything(good)
        for mutation in case.mutations(good / case.role):
            spoil(good, case.role, mutation, folder)
            try:
                found.append(Outcome(mutation, None, read_everything(folder) == before))
            except XpressError as problem:
                assert problem.exit_code == 2
                found.append(Outcome(mutation, str(problem).replace(str(folder), ""), False))
        return found

    return outcomes


def harmless(outcome: Outcome, role: str) -> Harmless | None:
    """The entry that allows a mutation to go unnoticed, with this outcome."""
    kind, subject = outcome.mutation.kind, outcome.mutation.subject
    for entry in HARMLESS:
        allowed = subject in entry.fields and (entry.kinds is None or kind in entry.kinds)
        if allowed and entry.unchanged == outcome.unchanged and entry.role in (None, role):
            return entry
    return None


def read_everything(folder: Path) -> tuple[str, str]:
    """Open a pair, read each tensor of both, and say what they are."""
    target, drafter = open_pair(str(folder / "target"), str(folder / "drafter"))
    target.embedding()
    target.head()
    target.decoder((0,), 8, AttentionForm.MASK)
    drafter.drafter(8, AttentionForm.MASK)
    if drafter.head is not None:
        drafter.refiner_module()
    return target.identity(), drafter.identity()


def spoil(good: Path, role: str, mutation: Mutation, folder: Path) -> None:
    """``folder`` as ``good``, with one of the two checkpoints spoilt; what an earlier mutation left there is replaced."""
    for part in ("target", "drafter"):
        if part == role and (folder / part).exists():
            shutil.rmtree(folder / part)
        if not (folder / part).exists():
            shutil.copytree(good / part, folder / part)
    mutation.apply(folder / role)


def test_generated_folders_are_many(pairs: Callable[[Case], Path]) -> None:
    """And no two of one case the same."""
    for case in CASES:
        names = [mutation.name for mutation in case.mutations(pairs(case) / case.role)]
        assert len(set(names)) == len(names) > MIN_MALFORMED


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_malformed_folder(case: Case, outcomes: Callable[[Case], list[Outcome]]) -> None:
    refused, wrong = 0, []
    for outcome in outcomes(case):
        message, name = outcome.message, outcome.mutation.name
        if message is None:
            if harmless(outcome, case.role) is None:
                wrong.append(f"{name} goes unnoticed ({'nothing changed' if outcome.unchanged else 'another model'})")
            continue
        refused += 1
        if not message.isprintable() or len(message) > 700 or not any(word in message for word in outcome.mutation.culprits):
            wrong.append(f"{name} is refused with {message!r}")
    assert not wrong, "\n".join(wrong)
    assert refused >= MIN_MALFORMED


@pytest.mark.usefixtures("quick_export")
@pytest.mark.parametrize("case", [case for case in CASES if not case.fields_only], ids=str)
def test_malformed_folders_through_the_command_line(
    case: Case, pairs: Callable[[Case], Path], outcomes: Callable[[Case], list[Outcome]], tmp_path: Path
) -> None:
    """Exit code 2, one line on standard error, and nothing at the output's place or beside it."""
    mutations = one_of_each_kind([outcome.mutation for outcome in outcomes(case) if outcome.message is not None])
    assert len(mutations) >= (20 if case.family == "sharded" else MIN_MALFORMED)
    for mutation in mutations:
        spoil(pairs(case), case.role, mutation, tmp_path)
        before = listing(tmp_path)
        output = tmp_path / "new" / "bundle"
        result = invoke("build", "--target", tmp_path / "target", "--drafter", tmp_path / "drafter", "--output", output, "--json")
        try:
            result.assert_refused(2)
            assert "Traceback" not in result.err
            assert listing(tmp_path) == before
        except AssertionError as problem:
            problem.add_note(f"{mutation.name}: {result}")
            raise


def one_of_each_kind(mutations: list[Mutation]) -> list[Mutation]:
    by_kind: dict[str, list[Mutation]] = {}
    for mutation in mutations:
        by_kind.setdefault(mutation.kind, []).append(mutation)
    generator = random.Random(SEED)
    return [generator.choice(of_kind) for of_kind in by_kind.values()]


def test_every_reason_is_needed(outcomes: Callable[[Case], list[Outcome]]) -> None:
    """An entry that no mutation needs would hide the next defect."""
    used = set()
    for case in CASES:
        for outcome in outcomes(case):
            if outcome.message is None and (entry := harmless(outcome, case.role)):
                used.add((outcome.mutation.subject, entry.why))
    assert used == {(name, entry.why) for entry in HARMLESS for name in entry.fields}
