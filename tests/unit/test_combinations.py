"""Every pair of the algorithm's options is either trained, by a row of the pairwise set, or refused with a reason."""

import combinations

from stretto.settings import OPTIONS


def test_a_pair_is_in_a_trained_row_or_refused_with_a_reason():
    trained = set().union(*map(combinations.covered, combinations.pairwise()))
    refused = {}
    for pair in combinations.pairs():
        if repr(pair) not in trained:
            refused[pair[0], str(pair[1]), pair[2], str(pair[3])] = combinations.refusals([pair[1], pair[3]])
    assert all(refused.values())
    # By hand, from docs/algorithms.md: no advantage without a teacher, with a KL in the reward or with refills; the
    # rollout's log-probs need no correction, and a snapshot that lags needs one; a KL in the reward needs the actor's.
    count = {
        ("advantage", "teacher"): 1,
        ("advantage", "KL"): 2,
        ("advantage", "refill"): 1,
        ("old policy", "correction"): 5,
        ("old policy", "KL"): 4,
    }
    found: dict[tuple[str, str], int] = {}
    for one, _, other, _ in refused:
        found[one, other] = found.get((one, other), 0) + 1
    assert found == count


def test_every_option_of_the_algorithm_is_among_the_combinations():
    varied = {name for values in combinations.VALUES.values() for settings in values for name in settings}
    continuous = {
        "advantage_eps", "clip_low", "clip_high", "tis_cap", "mis_low", "mis_high",
    }  # fmt: skip
    named = {name for name in OPTIONS if name.startswith("algorithm.")}
    assert named - {f"algorithm.{key}" for key in continuous} <= varied


def test_a_row_without_any_refusal_stays_without():
    assert all(combinations.refusals(row) == [] for row in combinations.pairwise())
