"""``export_onnx``: a model, compressed or dense, as an ONNX file that was run and compared with it."""

import contextlib
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim
from transformers import PreTrainedModel

from hf_comera.memory.estimate import example_inputs

__all__ = ["OnnxExport", "export_onnx"]

EXPORTED, CHECKED = (2, 16), ((2, 16), (1, 5), (3, 12))
"""Rows and tokens of the batch that is followed, and of those that the file is run with."""

TOLERANCE = 1e-3
"""Of the largest difference, over the largest entry that the model computes; float32 in another order gives 1e-5."""


@dataclass(frozen=True, kw_only=True)
class OnnxExport:
    """A file that computes what the model does, for batches of any size."""

    path: Path
    bytes: int
    """Of the file and of the weights beside it."""
    inputs: tuple[str, ...]
    output: str
    """Name of the first output, which was compared."""
    error: float
    """The largest difference from the model, over the largest entry of its output."""


def export_onnx(model: PreTrainedModel, path: str | os.PathLike[str]) -> OnnxExport:
    """Write ``model`` as ONNX, run the file in ONNX Runtime, and compare it with the model.

    Rows and tokens may be of any number. A cache of keys and values is no output.

    Args:
        model: Compressed or dense, in float32, on the CPU; it is left as it was.
        path: The file to write; weights go into a second one beside it, ``path`` with ``.data`` added.

    Raises:
        ImportError: If the packages of the extra ``onnx`` are missing.
        ValueError: If the model has another dtype, cannot be exported, or the file computes something else.
    """
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError('ONNX needs onnxruntime and onnxscript: pip install "hf_comera[onnx]".') from error
    if model.dtype != torch.float32:
        raise ValueError(
            f"The model is in {model.dtype}, and ONNX Runtime computes in float32 on a CPU. Load it with "
            "from_pretrained(..., dtype=torch.float32), or call model.float()."
        )
    path = Path(path)
    with _plain_evaluation(model):
        inputs = _inputs(model, *EXPORTED)
        sizes = {name: {0: Dim.DYNAMIC, **({1: Dim.DYNAMIC} if x.ndim == 2 else {})} for name, x in inputs.items()}
        try:
            names = [name for name, value in model(**inputs).items() if isinstance(value, Tensor)]
            options: dict[str, Any] = {"kwargs": inputs, "dynamic_shapes": sizes, "output_names": names}
            torch.onnx.export(model, (), path, dynamo=True, verbose=False, **options)
        except RuntimeError as error:  # all errors of the exporter are
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"torch.onnx.export does not follow {type(model).__name__} ({reason}). Try the dense model: "
                "export_onnx(model.merge_and_unload(), path)."
            ) from error
        output, largest = _largest_error(model, path)
    files = [path, path.with_name(f"{path.name}.data")]
    num_bytes = sum(file.stat().st_size for file in files if file.exists())
    return OnnxExport(path=path, bytes=num_bytes, inputs=tuple(inputs), output=output, error=largest)


@contextlib.contextmanager
def _plain_evaluation(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout and without a cache, which would be one output more for each layer."""
    training, cached = model.training, getattr(model.config, "use_cache", None)
    model.eval()
    if cached:
        model.config.use_cache = False
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        if cached:
            model.config.use_cache = cached


def _inputs(model: PreTrainedModel, rows: int, tokens: int) -> dict[str, Tensor]:
    """Random tokens, the last of the first row masked, or random pixels."""
    generator = torch.Generator().manual_seed(rows * tokens)
    found = example_inputs(model, rows, tokens)
    takes = inspect.signature(type(model).forward).parameters
    if "input_ids" in found:
        vocabulary: Any = model.get_input_embeddings().num_embeddings
        found["input_ids"] = torch.randint(vocabulary, (rows, tokens), generator=generator)
        if "attention_mask" in takes:
            found["attention_mask"] = torch.ones(rows, tokens, dtype=torch.long)
            found["attention_mask"][0, tokens // 2 + 1 :] = 0
        if "decoder_input_ids" in takes:
            found["decoder_input_ids"] = torch.randint(vocabulary, (rows, tokens), generator=generator)
    else:
        found["pixel_values"] = torch.randn(found["pixel_values"].shape, generator=generator)
    return found


def _largest_error(model: PreTrainedModel, path: Path) -> tuple[str, float]:
    """Name of the first output, and its largest difference from the model's.

    Raises:
        ValueError: If that is more than rounding.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    output, worst = session.get_outputs()[0].name, 0.0
    for size in CHECKED:
        inputs = _inputs(model, *size)
        found: Any = session.run([output], {name: tensor.numpy() for name, tensor in inputs.items()})[0]
        wanted = model(**inputs)[0]
        difference = (torch.from_numpy(found) - wanted).abs().max() / wanted.abs().max()
        worst = max(worst, float(difference))
        if not difference <= TOLERANCE:
            raise ValueError(
                f"{path.name} was written, but for a batch of {size[0]} x {size[1]} ONNX Runtime computes something "
                f"else than {type(model).__name__}: {output} differs by {float(difference):.2g} of its largest entry, "
                f"rounding is below {TOLERANCE:g}. Try the dense model: export_onnx(model.merge_and_unload(), path)."
            )
    return output, worst
