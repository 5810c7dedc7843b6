"""hf_comera/compress/trimming.py: any budget is met within one rank, the least important ranks go, none twice."""

import itertools

import numpy as np
import pytest

from hf_comera.compress.trimming import LayerRanks, smallest_size, trim


def random_trains(seed):
    """A few trains of one to six cores, with ties and zeros among the importances, and floors of zero to three."""
    generator = np.random.default_rng(seed)
    trains = []
    for _ in range(generator.integers(1, 5)):
        bonds = generator.integers(0, 6)
        importance = [np.round(generator.exponential(size=generator.integers(1, 9)), 1) for _ in range(bonds)]
        factors = generator.integers(1, 10, size=bonds + 1).tolist()
        trains.append(LayerRanks(factors, importance, floor=int(generator.integers(0, 4))))
    return trains


def size_of(trains, kept):
    """Entries of all cores, counted from shapes."""
    total = 0
    for train, indices in zip(trains, kept, strict=True):
        bonds = [1, *map(len, indices), 1]
        total += sum(factor * bonds[k] * bonds[k + 1] for k, factor in enumerate(train.factors))
    return total


def full_size(trains):
    return size_of(trains, [[range(len(values)) for values in train.importance] for train in trains])


def budgets(trains):
    smallest, full = smallest_size(trains), full_size(trains)
    return sorted({smallest, smallest + 1, (2 * smallest + full) // 3, (smallest + full) // 2, full - 1, full})[-6:]


every_seed = pytest.mark.parametrize("seed", range(40))


@every_seed
def test_every_budget_is_met_and_no_removed_rank_fits(seed):
    trains = random_trains(seed)
    for budget in [budget for budget in budgets(trains) if budget >= smallest_size(trains)]:
        kept = trim(trains, budget)
        size = size_of(trains, kept)
        assert size <= budget
        for place, train in enumerate(trains):
            for bond, values in enumerate(train.importance):
                if 0 < len(kept[place][bond]) < len(values):
                    more = [list(indices) for indices in kept]
                    more[place][bond] = range(len(kept[place][bond]) + 1)
                    assert size_of(trains, more) > budget
            if train.importance and not len(kept[place][0]):  # a train that went does not fit in either
                more = [list(indices) for indices in kept]
                more[place] = [range(1)] * len(train.importance)
                assert size_of(trains, more) > budget


@every_seed
def test_the_most_important_ranks_of_each_bond_stay_in_order(seed):
    trains = random_trains(seed)
    for budget in budgets(trains):
        if budget < smallest_size(trains):
            continue
        for train, indices in zip(trains, trim(trains, budget), strict=True):
            for values, index in zip(train.importance, indices, strict=True):
                order = sorted(range(len(values)), key=lambda rank: (-values[rank], rank))
                assert index.tolist() == sorted(order[: len(index)])


@every_seed
def test_floors_hold_and_trains_go_as_a_whole(seed):
    trains = random_trains(seed)
    for train, indices in zip(trains, trim(trains, smallest_size(trains)), strict=True):
        assert [len(index) for index in indices] == [min(train.floor, len(values)) for values in train.importance]
    for train, indices in zip(trains, trim(trains, (smallest_size(trains) + full_size(trains)) // 2), strict=True):
        ranks = [len(index) for index in indices]
        assert all(ranks) or not any(ranks)
        assert all(r >= min(train.floor, len(v)) for r, v in zip(ranks, train.importance, strict=True))


@every_seed
def test_nothing_goes_at_full_size_and_nothing_meets_less_than_the_smallest(seed):
    trains = random_trains(seed)
    kept = trim(trains, full_size(trains))
    assert [[len(i) for i in row] for row in kept] == [[len(v) for v in train.importance] for train in trains]
    with pytest.raises(ValueError, match=f"cannot be met: the smallest possible is {smallest_size(trains):,}"):
        trim(trains, smallest_size(trains) - 1)


def test_trimming_keeps_the_most_importance_where_all_ranks_cost_the_same():
    """Trains of two cores with equal factors: every subset of ranks of each size, by brute force."""
    generator = np.random.default_rng(0)
    importance = [generator.exponential(size=rank) for rank in (3, 4, 2)]
    trains = [LayerRanks((3, 4), [values]) for values in importance]
    values = np.concatenate(importance)
    for budget in range(0, 7 * len(values) + 1):
        kept = trim(trains, budget)
        best = max(sum(subset) for subset in itertools.combinations(values, budget // 7))
        assert sum(v[i[0]].sum() for v, i in zip(importance, kept, strict=True)) == pytest.approx(best)


def test_ranks_that_save_more_go_first_at_equal_importance():
    trains = [LayerRanks((2, 2), [np.ones(4)]), LayerRanks((20, 20), [np.ones(4)])]
    assert [len(i[0]) for i in trim(trains, full_size(trains) - 40)] == [4, 3]


def test_what_the_last_removal_saved_too_much_is_given_back():
    """The large rank goes last and frees room for the small ones that went before it."""
    trains = [LayerRanks((1, 1), [np.array([9.0, 0.1, 0.1])]), LayerRanks((50, 50), [np.array([9.0, 8.0])])]
    assert [len(i[0]) for i in trim(trains, 106)] == [3, 1]


@pytest.mark.parametrize(
    ("budget", "ranks"), [(61, [0, 0]), (62, [1, 1]), (122, [1, 1]), (123, [1, 2]), (183, [1, 2]), (184, [1, 3])]
)
def test_a_train_that_frees_too_much_comes_back_smaller(budget, ranks):
    """The last rank of the first bond is worth least, and the whole train goes with it; what fits in is given back."""
    train = LayerRanks((1, 60, 1), [np.array([0.2]), np.array([9.0, 8.0, 7.0])])
    assert [len(index) for index in trim([train], budget)[0]] == ranks


def test_ties_are_broken_by_place():
    trains = [LayerRanks((3, 4), [np.ones(4)]), LayerRanks((3, 4), [np.ones(4)])]
    runs = [[row[0].tolist() for row in trim(trains, 5 * 7)] for _ in range(2)]
    assert runs[0] == runs[1] == [[0], [0, 1, 2, 3]]


@every_seed
def test_live_size_is_the_size_without_negative_importance(seed):
    for train in random_trains(seed):
        for values in train.importance:
            values[values < 0.3] = -1
        live = [max((values >= 0).sum(), min(train.floor, len(values))) for values in train.importance]
        expected = size_of([train], [[range(rank) for rank in live]]) if all(live) else 0
        assert train.live_size() == expected
        assert size_of([train], trim([train], expected)) == expected
