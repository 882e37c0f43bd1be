"""When rounds that many rows share draft: simulated machines and texts of known cost and acceptance."""

from __future__ import annotations

import pytest

from xpress_runtime.speculation.shared import SharedPolicy

# A machine on which plain steps of many rows cost hardly more than of one, and blocks grow with every row; seconds.
PLAIN = {1: 0.013, 8: 0.020}
DRAFTED = {1: 0.026, 8: 0.150}


def _run(policy: SharedPolicy, num_rows: int, tau: float, seconds: float) -> tuple[float, float]:
    """Let it decide for so long: tokens that were made, and the share of the time that went to drafted rounds."""
    spent = drafted = tokens = owed = 0.0
    while spent < seconds:
        if policy.drafts(num_rows):
            cost = DRAFTED[num_rows]
            # Whole tokens, tau on average.
            owed += tau
            length = max(int(owed), 1)
            owed -= length
            policy.record_drafted(num_rows, cost, [length] * num_rows)
            drafted += cost
            tokens += length * num_rows
        else:
            cost = PLAIN[num_rows]
            policy.record_plain(num_rows, cost)
            tokens += num_rows
        spent += cost
    return tokens, drafted / spent


@pytest.mark.parametrize(("num_rows", "tau", "drafts"), [(1, 3.0, True), (1, 1.2, False), (8, 3.0, False)])
def test_rounds_draft_where_it_pays(num_rows: int, tau: float, drafts: bool) -> None:
    policy = SharedPolicy(8, PLAIN, DRAFTED)
    tokens, share = _run(policy, num_rows, tau, 60.0)
    best = 60.0 * num_rows * max(1 / PLAIN[num_rows], tau / DRAFTED[num_rows])
    assert tokens > 0.93 * best
    assert share > 0.9 if drafts else share < 0.1


def test_many_rows_draft_where_a_block_of_many_costs_little_more() -> None:
    policy = SharedPolicy(8, {1: 0.013, 8: 0.014}, {1: 0.020, 8: 0.022})
    assert all(policy.drafts(num_rows) for num_rows in range(1, 9))


def test_a_text_that_is_drafted_well_is_noticed_and_left_again() -> None:
    policy = SharedPolicy(8, PLAIN, DRAFTED)
    shares = [_run(policy, 1, tau, 60.0)[1] for tau in (1.0, 4.0, 1.0)]
    assert shares[0] < 0.1 < 0.6 < shares[1]
    assert shares[2] < 0.15


def test_other_numbers_of_rows_are_estimated_in_between() -> None:
    policy = SharedPolicy(8, PLAIN, DRAFTED)
    # About 2.0 is expected at first; four rows need more than 4.
    assert policy.drafts(1)
    assert not policy.drafts(4)


def test_a_single_slow_round_changes_little() -> None:
    policy = SharedPolicy(1, {1: 0.013}, {1: 0.024})
    policy.record_drafted(1, 30.0, [2])
    policy.record_drafted(1, 0.024, [2])
    assert policy.drafts(1)
    assert "mean acceptance length 2.00" in policy.explain()
