"""hf_comera/memory/policy.py: choices are checked, and names stand for what they say."""

import dataclasses
import re

import pytest

from hf_comera.memory.policy import NAMED_POLICIES, ActivationPolicy, as_policy

REFUSED = [  # (settings, message)
    ({"products": "keeps"}, "products='keeps' of ActivationPolicy must be one of 'rebuild', 'keep'."),
    ({"functions": True}, "functions=True of ActivationPolicy must be one of 'rebuild', 'keep'."),
    ({"norms": None}, "norms=None of ActivationPolicy must be one of 'rebuild', 'keep'."),
    ({"sums": "fp8"}, "sums='fp8' of ActivationPolicy must be one of 'rebuild', 'keep'."),
    (
        {"attention": "rebuild"},
        "attention='rebuild' of ActivationPolicy must be one of 'recompute', 'scores', 'keep'.",
    ),
    ({"dropout": "bit"}, "dropout='bit' of ActivationPolicy must be one of 'bits', 'keep'."),
    ({"rest": ["fp8"]}, "rest=['fp8'] of ActivationPolicy must be one of 'keep', 'fp8'."),
    ({"depth": -1}, "depth=-1 of ActivationPolicy must be an integer >= 0, such as "),
    ({"depth": 2.5}, "depth=2.5 of ActivationPolicy must be an integer >= 0, such as "),
    ({"min_bytes": "1MB"}, "min_bytes='1MB' of ActivationPolicy must be an integer >= 0, such as 65536."),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_is_out_of_range_is_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ActivationPolicy(**settings)


@pytest.mark.parametrize("name", ["fast", "", "RANK", 1, {"rest": "fp8"}, ["rank"], ActivationPolicy])
def test_names_that_are_unknown_are_refused_with_those_that_are_known(name):
    known = "'keep', 'rank', 'rank+fp8', 'fp8', or an ActivationPolicy(...)"
    with pytest.raises(ValueError, match=re.escape(f"{name!r} is unknown. Use one of {known}")):
        as_policy(name)


def test_names():
    assert as_policy(None) is None
    assert as_policy("rank") == ActivationPolicy()
    assert as_policy("rank+fp8") == ActivationPolicy(rest="fp8")
    policy = ActivationPolicy(depth=1)
    assert as_policy(policy) is policy
    assert {name: as_policy(name) for name in NAMED_POLICIES} == NAMED_POLICIES


@pytest.mark.parametrize(
    ("policy", "kinds"),
    [
        ("keep", set()),
        ("fp8", set()),
        ("rank", {"products", "functions", "norms", "sums", "scores"}),
        (ActivationPolicy(attention="recompute"), {"products", "functions", "norms", "sums", "scores", "attention"}),
        (ActivationPolicy(attention="keep", sums="keep"), {"products", "functions", "norms"}),
    ],
)
def test_kinds_that_are_rebuilt(policy, kinds):
    policy = as_policy(policy)
    every = {"products", "functions", "norms", "sums", "scores", "attention"}
    assert {kind for kind in every if policy.rebuilds(kind)} == kinds
    assert policy.rebuilds("dropout")  # a product with bits, where these are kept


def test_a_policy_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ActivationPolicy().depth = 3
