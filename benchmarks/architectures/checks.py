"""What is checked of one architecture: a small model in tensor-train form does all that its dense baseline does.

Every model is built from the config of ``configs.py`` and reads the batch of ``inputs.py``.
"""

import copy
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel, set_seed
from transformers.pytorch_utils import Conv1D

from benchmarks.architectures.classes import kind_of, model_class
from benchmarks.architectures.configs import short_config, shrunken_config
from benchmarks.architectures.inputs import Batch, find_batch, outputs, total
from hf_comera import ComeraConfig, get_comera_model, merge_and_unload, plan
from hf_comera.compress.selection import COMPRESSIBLE_TYPES
from hf_comera.modules import TensorTrainModule

__all__ = ["CHECKS", "DENSE", "NOTHING", "PASSED", "dense_share", "sweep_architecture"]
PASSED, NOTHING = "passed", "nothing to compress"
NOT_APPLICABLE, FAILED = "does not apply: ", "failed: "
DENSE = "dense"
RANK, FULL_RANK = 8, 100_000
SAME, MERGED, DECOMPOSED, GRADIENTS = 1e-3, 2e-3, 5e-3, 2e-2
"""Largest relative differences: of gradients under a policy, of outputs after merging and after a full-rank
compression (of the largest entry), and of gradients there (of the norm)."""
NEGLIGIBLE = 1e-5
"""Of the largest gradient of a model; below, gradients are rounding, as those of a key's bias are."""
NUM_NEW_TOKENS = 6


def dense_share(model_type: str) -> dict[str, Any]:
    """Columns of the row of ``model_type``: parameters, what share of them stays dense, the largest part, the reason.

    Measured on the default config with at most four layers. Where it builds no model on the meta device, the columns
    are empty but for ``dense_reason``, which says so.
    """
    try:
        with torch.device("meta"):
            model = model_class(model_type)._from_config(short_config(model_type))
    except Exception as problem:
        told = f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:120]
        return {"dense_reason": f"not measured, no model on the meta device ({told})"}
    total = sum(parameter.numel() for parameter in model.parameters())
    try:
        compression = plan(model, ComeraConfig())
    except ValueError:
        compressed, ratio = set(), 1.0
    else:
        compressed, ratio = set(compression.by_name), compression.ratio
    parts = _dense_parts(model, compressed)
    pattern, _ = parts.most_common(1)[0]
    return {
        "parameters": total,
        "stays_dense": round(parts.total() / total, 4),
        "times_smaller": round(ratio, 2),
        "dense_part": pattern,
        "dense_share": round(parts[pattern] / total, 4),
        "dense_reason": _reason(model, pattern),
    }


def _dense_parts(model: PreTrainedModel, compressed: set[str]) -> Counter[str]:
    """Entries of the parameters that stay dense, by name with the numbers of layers left out."""
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        if owner not in compressed or kind != "weight":
            parts[_pattern(name)] += parameter.numel()
    return parts


def _pattern(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name)


def _reason(model: PreTrainedModel, pattern: str) -> str:
    """Why the parameters of this name stay dense."""
    name, parameter = next(pair for pair in model.named_parameters() if _pattern(pair[0]) == pattern)
    owner = model.get_submodule(name.rpartition(".")[0])
    kind = type(owner)
    if kind in COMPRESSIBLE_TYPES:
        return f"{kind.__name__}, no default target" if name.endswith(".weight") else f"bias of {kind.__name__}"
    if isinstance(owner, nn.Embedding | nn.Linear | Conv1D):
        parent = next(base.__name__ for base in (nn.Embedding, nn.Linear, Conv1D) if isinstance(owner, base))
        return f"{kind.__name__}, a subclass of {parent}"
    if isinstance(owner, _ConvNd):
        return f"convolution ({kind.__name__})"
    return f"{parameter.ndim}-D parameter of {kind.__name__}"


class NotApplicable(Exception):  # noqa: N818
    """A check asks for something that the dense model cannot do either; says what."""


@dataclass
class Subject:
    """An architecture, its dense model, which is copied and never called (LeViT keeps graphs), and a batch."""

    model_type: str
    dense: PreTrainedModel
    batch: Batch
    compressed: PreTrainedModel | None = None

    def new_compressed(self) -> PreTrainedModel:
        """A model in tensor-train form, built from scratch once, with weights of its own."""
        if self.compressed is None:
            config = shrunken_config(self.model_type)
            set_seed(0)
            self.compressed = get_comera_model(type(self.dense), ComeraConfig(rank=RANK), config=config)
        return copy.deepcopy(self.compressed).eval()


def sweep_architecture(send: Callable[[dict[str, Any]], None], model_type: str) -> None:
    """All checks of ``model_type``, each sent as soon as it is made.

    Args:
        send: Takes columns of the row of this architecture.
        model_type: As in ``config.json``.
    """
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning is for users; what it warns of is checked
        _sweep(send, model_type)


def _sweep(send: Callable[[dict[str, Any]], None], model_type: str) -> None:
    try:
        send({"class": model_class(model_type).__name__, "kind": kind_of(model_type)})
        subject = _subject(model_type)
    except Exception as problem:
        send({DENSE: FAILED + _told(problem)})
        return
    send({DENSE: PASSED, "inputs": " + ".join(subject.batch)})
    send(dense_share(model_type))
    for name, check in CHECKS.items():
        outcome = _outcome(check, subject)
        send({name: outcome})
        if outcome == NOTHING:
            return


def _subject(model_type: str) -> Subject:
    config = shrunken_config(model_type)
    set_seed(0)
    dense = model_class(model_type)._from_config(config).eval()
    return Subject(model_type, dense, find_batch(copy.deepcopy(dense)))


def _outcome(check: Callable[[Subject], None], subject: Subject) -> str:
    try:
        check(subject)
    except NotApplicable as reason:
        return f"{NOT_APPLICABLE}{reason}"
    except Exception as problem:
        return NOTHING if "leave nothing to compress" in str(problem) else FAILED + _told(problem)
    return PASSED


def _told(problem: Exception) -> str:
    """One line without folders of this machine."""
    text = re.sub(r"/(?:[\w.-]+/)+", "", " ".join(str(problem).split()))
    return f"{type(problem).__name__}: {text}"[:240] if not isinstance(problem, AssertionError) else text[:240]


def check_scratch(subject: Subject) -> None:
    """From scratch: outputs are finite, and have the dimensions of the dense model's."""
    expected = outputs(copy.deepcopy(subject.dense), subject.batch)
    actual = outputs(subject.new_compressed(), subject.batch)
    # not the sizes: FastSpeech's follow from durations that it predicts
    assert [part.ndim for part in actual] == [part.ndim for part in expected], "outputs have other shapes"
    finite = [
        part.isfinite().all() or not other.isfinite().all() for part, other in zip(actual, expected, strict=True)
    ]
    assert all(finite), "outputs are not finite"


def check_backward(subject: Subject) -> None:
    """Backward: gradients are there, finite, and not zero wherever those of the merged model are."""
    model = subject.new_compressed()
    merged = merge_and_unload(copy.deepcopy(model))
    actual, expected = _gradients(model, subject.batch), _gradients(merged, subject.batch)
    _compare_gradients(actual, expected, GRADIENTS)
    smallest = NEGLIGIBLE * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, layer in model.named_modules():
        if isinstance(layer, TensorTrainModule) and f"{name}.weight" in expected:
            wanted = expected[f"{name}.weight"].abs().max() > smallest
            for core_name in (f"{name}.core_{number}" for number in range(len(layer.cores()))):
                assert core_name in actual, f"{core_name} has no gradient"
                assert actual[core_name].isfinite().all(), f"the gradient of {core_name} is not finite"
                assert actual[core_name].any() or not wanted, f"the gradient of {core_name} is zero"


def check_reload(subject: Subject) -> None:
    """Saving and loading: no missing or unexpected keys, outputs equal to the bit."""
    model = subject.new_compressed()
    problem = _reload_problem(model, subject.batch)
    if problem is not None:
        if _reload_problem(copy.deepcopy(subject.dense), subject.batch) is not None:
            raise NotApplicable("the dense class does not load what it saves")
        raise AssertionError(problem)


def check_policy(subject: Subject) -> None:
    """Policy ``rank`` in training mode: the same gradients as without."""
    model = subject.new_compressed().train()
    try:
        _gradients(merge_and_unload(copy.deepcopy(model)), subject.batch)
    except Exception as problem:
        raise NotApplicable(f"the dense model does not train on this batch ({_told(problem)[:100]})") from None
    plain, again = (_gradients(copy.deepcopy(model), subject.batch) for _ in range(2))
    if any(not torch.equal(plain[name], again[name]) for name in plain):
        raise NotApplicable("two equal calls in training mode differ")
    try:
        model.set_activation_policy("rank")
    except ValueError as problem:  # no layer of it can be checkpointed
        raise NotApplicable(_told(problem)[:100]) from None
    _compare_gradients(_gradients(model, subject.batch), plain, SAME, all_of_them=True)


def check_merge(subject: Subject) -> None:
    """Merging: a dense model with the same outputs."""
    model = subject.new_compressed()
    expected = outputs(model, subject.batch)
    _compare_outputs(outputs(merge_and_unload(model), subject.batch), expected, MERGED)


def check_full_rank(subject: Subject) -> None:
    """Compressing the dense model at full rank: the same outputs, and the same gradients of what stays dense."""
    dense = copy.deepcopy(subject.dense)
    expected, gradients = outputs(dense, subject.batch), _gradients(dense, subject.batch)
    model = get_comera_model(copy.deepcopy(subject.dense), ComeraConfig(rank=FULL_RANK)).eval()
    _compare_outputs(outputs(model, subject.batch), expected, DECOMPOSED)
    _compare_gradients(_gradients(model, subject.batch), gradients, GRADIENTS)


def check_generation(subject: Subject) -> None:
    """Greedy generation with a cache: the tokens that the merged model gives."""
    model = subject.new_compressed()
    merged = merge_and_unload(copy.deepcopy(model))
    if not merged.can_generate():
        raise NotApplicable("it does not generate")
    try:
        expected = _generated(merged, subject.batch)
    except Exception as problem:
        raise NotApplicable(f"the dense model does not generate from this batch ({_told(problem)[:100]})") from None
    actual = _generated(model, subject.batch)
    assert torch.equal(actual, expected), f"tokens {actual.tolist()} instead of {expected.tolist()}"


CHECKS: dict[str, Callable[[Subject], None]] = {
    "scratch": check_scratch,
    "backward": check_backward,
    "reload": check_reload,
    "policy": check_policy,
    "merge": check_merge,
    "full_rank": check_full_rank,
    "generation": check_generation,
}


def _gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad()
    total(outputs(model, batch)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.numel()}


def _compare_gradients(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, *, all_of_them: bool = False
) -> None:
    """Compare those of parameters that both models have, or of all: the norm of the difference relative to the norm.

    Rounding moves an entry behind a ReLU here and there, so the largest entry would say nothing.
    """
    floor = NEGLIGIBLE * max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        if name in actual:
            difference = float((actual[name] - gradient).norm()) / max(float(gradient.norm()), floor)
            assert not difference > tolerance, f"the gradient of {name} differs by {difference:.2g}"
            assert actual[name].isfinite().all() or not gradient.isfinite().all(), f"gradient of {name} is not finite"
        else:
            assert not all_of_them, f"{name} has no gradient"


def _compare_outputs(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if theirs.numel() == 0:
            continue
        ours, theirs = ours.detach().nan_to_num(), theirs.detach().nan_to_num()
        difference = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))
        assert not difference > tolerance, f"output {number} differs by {difference:.2g}"


def _reload_problem(model: PreTrainedModel, batch: Batch) -> str | None:
    try:
        return _reload_difference(model, batch)
    except Exception as problem:
        return _told(problem)


def _reload_difference(model: PreTrainedModel, batch: Batch) -> str | None:
    expected = outputs(model, batch)
    dense_class = getattr(model, "_dense_class", type(model))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded, info = dense_class.from_pretrained(folder, output_loading_info=True)
    wrong = {kind: sorted(map(str, info[kind]))[:2] for kind in ("missing_keys", "unexpected_keys") if info[kind]}
    if wrong:
        return f"{wrong}"
    actual = outputs(loaded.eval(), batch)
    equal = [torch.equal(part.nan_to_num(), other.nan_to_num()) for part, other in zip(actual, expected, strict=True)]
    return None if all(equal) else "outputs are not those of the model that was saved"


def _generated(model: PreTrainedModel, batch: Batch) -> Tensor:
    settings: dict[str, Any] = {
        "max_new_tokens": NUM_NEW_TOKENS,
        "min_new_tokens": NUM_NEW_TOKENS,
        "do_sample": False,
        "num_beams": 1,
    }
    given = {name: value for name, value in batch.items() if name not in ("decoder_input_ids", "use_cache")}
    if model.config.is_encoder_decoder:
        settings["decoder_start_token_id"] = 1
    set_seed(0)
    tokens = model.generate(**given, **settings, use_cache=True)
    return tokens if isinstance(tokens, Tensor) else tokens.sequences
