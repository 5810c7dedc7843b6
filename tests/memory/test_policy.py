"""hf_comera/memory/policy.py: choices are checked, and names stand for what they say."""

import copy
import dataclasses
import pickle
import re

import pytest

from hf_comera.memory.policy import NAMED_POLICIES, ActivationPolicy, as_policy

REFUSED = [  # (settings, message)
    ({"recompute": "yes"}, "recompute='yes' of ActivationPolicy must be True or False."),
    ({"recompute": None}, "recompute=None of ActivationPolicy must be True or False."),
    ({"attention": "scores"}, "attention='scores' of ActivationPolicy must be 'keep' or 'recompute'."),
    ({"storage": ["fp8"]}, "storage=['fp8'] of ActivationPolicy must be 'keep' or 'fp8'."),
    ({"min_bytes": "1MB"}, "min_bytes='1MB' of ActivationPolicy must be an integer >= 0, such as 65536."),
    ({"min_bytes": -1}, "min_bytes=-1 of ActivationPolicy must be an integer >= 0, such as 65536."),
    ({"min_bytes": True}, "min_bytes=True of ActivationPolicy must be an integer >= 0, such as 65536."),
    (
        {"attention": "recompute", "recompute": False},
        "attention='recompute' of ActivationPolicy needs recompute=True",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_is_out_of_range_is_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ActivationPolicy(**settings)


GONE = [
    *((name, "rebuild", "recompute=True or False") for name in ("products", "functions", "norms", "sums")),
    ("depth", 6, "recompute=True or False"),
    ("dropout", "bits", "masks are always drawn again or kept in bits"),
    ("rest", "fp8", "storage='keep' or 'fp8'"),
]


@pytest.mark.parametrize(("name", "value", "instead"), GONE)
def test_settings_of_former_versions_say_what_to_use(name, value, instead):
    with pytest.raises(
        TypeError, match=re.escape(f"{name}={value!r} of ActivationPolicy is no longer a setting")
    ) as e:
        ActivationPolicy(**{name: value})
    assert instead in str(e.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        ActivationPolicy(colour="red")


@pytest.mark.parametrize("name", ["fast", "", "RANK", 1, {"storage": "fp8"}, ["rank"], ActivationPolicy])
def test_names_that_are_unknown_are_refused_with_those_that_are_known(name):
    known = "'keep', 'rank', 'rank+fp8', 'fp8', or an ActivationPolicy(...)"
    with pytest.raises(ValueError, match=re.escape(f"{name!r} is unknown. Use one of {known}")):
        as_policy(name)


def test_names():
    assert as_policy(None) is None
    assert as_policy("keep") == ActivationPolicy(recompute=False)
    assert as_policy("rank") == ActivationPolicy()
    assert as_policy("fp8") == ActivationPolicy(recompute=False, storage="fp8")
    assert as_policy("rank+fp8") == ActivationPolicy(attention="recompute", storage="fp8")
    policy = ActivationPolicy(min_bytes=1)
    assert as_policy(policy) is policy
    assert {name: as_policy(name) for name in NAMED_POLICIES} == NAMED_POLICIES


def test_a_policy_does_not_change_and_is_copied():
    policy = ActivationPolicy(storage="fp8", min_bytes=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.min_bytes = 4
    assert copy.deepcopy(policy) == pickle.loads(pickle.dumps(policy)) == policy
    assert dataclasses.replace(policy, min_bytes=4) == ActivationPolicy(storage="fp8", min_bytes=4)
