"""What a generation measured: acceptance, and where its time went.

Counts refer to tokens that were kept. The first token comes from the prompt's prefill and belongs to no round.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Stage(Enum):
    """Where graph time goes. Draft: drafter and base logits; refine: Jacobi passes; verify: target and acceptance (all of a plain step)."""

    PREFILL = "prefill"
    DRAFT = "draft"
    REFINE = "refine"
    VERIFY = "verify"


@dataclass
class GenerationStats:
    """Counts and times of one generation.

    ``num_proposals``: proposals of a full block, 0 in plain decoding; ``num_passes``, ``shortlist`` and ``draft_steps`` are None where the
    drafter has none. ``seed``: what the noise was made of, None without sampling. Of every round: ``proposals`` that were verified (fewer
    than a full block where speculation is "auto", 0 for a plain step), ``acceptance_lengths`` (accepted drafts + 1, as verified),
    ``kept_lengths`` (tokens that were kept; only the last can be shorter, where a stop or a limit cut it).
    """

    prompt_tokens: int
    num_proposals: int
    num_passes: int | None
    speculation: str = "on"
    drafter: str | None = None
    shortlist: int | None = None
    draft_steps: int | None = None
    seed: int | None = None
    proposals: list[int] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    kept_lengths: list[int] = field(default_factory=list)
    stage_seconds: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(Stage, 0.0))
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0

    def record_round(self, num_proposals: int, num_emitted: int, num_kept: int, seconds: float) -> None:
        """A round verified ``num_proposals``, emitted and kept so many tokens, and took that long; its stages are counted apart."""
        self.proposals.append(num_proposals)
        self.acceptance_lengths.append(num_emitted)
        self.kept_lengths.append(num_kept)
        self.decode_seconds += seconds

    @property
    def rounds(self) -> int:
        """Verifications by the target (in plain decoding: steps)."""
        return len(self.kept_lengths)

    @property
    def output_tokens(self) -> int:
        return 1 + sum(self.kept_lengths)

    @property
    def proposed(self) -> int:
        """Proposals that were verified."""
        return sum(self.proposals)

    @property
    def accepted(self) -> int:
        """Accepted drafts among the kept tokens."""
        return sum(min(kept, length - 1) for kept, length in zip(self.kept_lengths, self.acceptance_lengths, strict=True))

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / proposed; None where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """τ: kept tokens per verification; None without a round."""
        return sum(self.kept_lengths) / self.rounds if self.rounds else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each proposal slot 1 … P-1, the share of the rounds that verified it in which it was accepted; 0 where none did."""
        if not self.rounds:
            return []
        return [accepted / max(verified, 1) for accepted, verified in zip(*self.slot_counts(), strict=True)]

    def slot_counts(self) -> tuple[list[int], list[int]]:
        """For each proposal slot 1 … P-1, in how many rounds it was accepted, and in how many it was verified."""
        slots = range(1, self.num_proposals + 1)
        accepted = [sum(length > slot for length in self.acceptance_lengths) for slot in slots]
        return accepted, [sum(proposed >= slot for proposed in self.proposals) for slot in slots]

    @property
    def width_counts(self) -> dict[int, int]:
        """How many rounds verified how many proposals; 0 are plain steps."""
        return dict(sorted(Counter(self.proposals).items()))

    @property
    def time_to_first_token(self) -> float:
        """Seconds from the start of the prompt's prefill to its first token."""
        return self.prefill_seconds

    @property
    def host_seconds(self) -> float:
        """Decoding time that is not graph execution."""
        graphs = sum(self.stage_seconds[stage] for stage in (Stage.DRAFT, Stage.REFINE, Stage.VERIFY))
        return max(self.decode_seconds - graphs, 0.0)

    @property
    def ms_per_token(self) -> float | None:
        """Decoding milliseconds per kept token, prefill and the first token left out; None where only the first was made."""
        tokens = self.output_tokens - 1
        return 1e3 * self.decode_seconds / tokens if tokens else None

    @property
    def tokens_per_second(self) -> float | None:
        per_token = self.ms_per_token
        return 1e3 / per_token if per_token else None

    def to_json(self) -> dict[str, Any]:
        """All figures, times in milliseconds."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "speculation": self.speculation,
            "drafter": self.drafter,
            "num_passes": self.num_passes,
            "shortlist": self.shortlist,
            "draft_steps": self.draft_steps,
            "seed": self.seed,
            "rounds": self.rounds,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_by_position": self.acceptance_by_position,
            "width_counts": {str(width): count for width, count in self.width_counts.items()},
            "prefill_ms": 1e3 * self.prefill_seconds,
            "time_to_first_token_ms": 1e3 * self.time_to_first_token,
            "draft_ms": 1e3 * self.stage_seconds[Stage.DRAFT],
            "refine_ms": 1e3 * self.stage_seconds[Stage.REFINE],
            "verify_ms": 1e3 * self.stage_seconds[Stage.VERIFY],
            "host_ms": 1e3 * self.host_seconds,
            "decode_ms": 1e3 * self.decode_seconds,
            "ms_per_token": self.ms_per_token,
            "tokens_per_second": self.tokens_per_second,
            "peak_memory_bytes": peak_memory_bytes(),
        }


def peak_memory_bytes() -> int | None:
    """The largest resident size of this process so far; None where the system does not tell."""
    # Not getrusage where there is another way: on Linux its figure survives exec, so a child starts with its parent's.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
