"""Fisher's exact test: a textbook value, and the laws of a p-value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import fisher_exact

from benchctl.analysis.compare.decide import Share, fisher_one_sided

shares = st.integers(0, 40).flatmap(lambda trials: st.builds(Share, st.integers(0, trials), st.just(trials)))


def test_the_lady_who_tasted_tea():
    assert fisher_one_sided(Share(3, 4), Share(1, 4)) == pytest.approx(17 / 70)


@given(larger=shares, smaller=shares)
def test_it_is_the_one_sided_test_of_scipy(larger, smaller):
    table = [[share.successes, share.trials - share.successes] for share in (larger, smaller)]
    expected = fisher_exact(table, alternative="greater").pvalue
    assert fisher_one_sided(larger, smaller) == pytest.approx(expected, rel=1e-6)


@given(larger=shares, smaller=shares)
def test_more_of_the_larger_share_is_less_probable(larger, smaller):
    probability = fisher_one_sided(larger, smaller)
    assert 0 < probability <= 1
    if larger.successes < larger.trials:
        assert fisher_one_sided(larger._replace(successes=larger.successes + 1), smaller) <= probability
