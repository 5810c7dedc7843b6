"""How far an input walks inside hf_comera before it is multiplied: few calls in few files get it."""

import sys
from pathlib import Path

import pytest
from torch import Tensor
from torch.utils._pytree import tree_leaves

import hf_comera
from hf_comera.modules import TTLinear
from hf_comera.modules.block import Block
from tests.fused_models import blocks_that_run, inputs_of, model_of, unfused

PACKAGE = Path(hf_comera.__file__).parent
MAX_STAYS, MAX_FILES = 12, 6


class Walks:
    """Lists the calls that get the input of a block, or of a layer outside of blocks, or give it back.

    Attributes:
        found: For each walk the stays of the input: ``file: function`` of one call after the other.
    """

    def __init__(self):
        self.found, self._start, self._memory, self._counted = [], None, None, set()

    def __enter__(self):
        sys.setprofile(self._watch)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _watch(self, frame, event, result):
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or PACKAGE not in path.parents:
            return
        values = list(frame.f_locals.values()) if event == "call" else [result]
        if event == "call" and self._start is None and len(values) > 1 and isinstance(values[0], Block | TTLinear):
            if not isinstance(values[1], Tensor):
                return
            self._start, self._memory, self._counted = frame, memory_of(values[1]), set()
            self.found.append([])
        if self._start is None:
            return
        tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
        if frame not in self._counted and any(memory_of(tensor) == self._memory for tensor in tensors):
            self._counted.add(frame)
            self.found[-1].append(f"{path.relative_to(PACKAGE)}: {frame.f_code.co_name}")
        if event == "return" and frame is self._start:
            self._start = None


def memory_of(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("form", ["blocks", "layers"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_an_input_takes_few_stays_in_few_files(name, form, dropout):
    model, inputs = model_of(name, dropout=dropout), inputs_of(name)
    assert blocks_that_run(model) != (0, 0)
    if form == "layers":
        model = unfused(model)
    with Walks() as walks:
        model(**inputs)
    assert len(walks.found) >= 4, "two blocks of two layers"
    for stays in walks.found:
        assert len(stays) <= MAX_STAYS, stays
        assert len({stay.partition(":")[0] for stay in stays}) <= MAX_FILES, stays
