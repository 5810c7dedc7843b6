"""Statistics of a trained model's layers on real inputs, from one pass: what a decomposition in their metric needs.

A linear layer has the second moment of its inputs, an embedding the number of times that each row was read. Both have
the sensitivity of the model's output to their error.
"""

import contextlib
import inspect
import json
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_comera.compress.selection import COMPRESSIBLE_TYPES
from hf_comera.modules import CompressedLayer
from hf_comera.tt.decomposition import low_rank_factors
from hf_comera.tt.weighted import OutputSpectrum

__all__ = ["Calibration", "InputStatistics", "calibrate", "smoothed_counts", "weight_matrix"]

logger = logging.getLogger(__name__)

FILE = "calibration.safetensors"
FORMAT = "hf_comera calibration 1"
RECENT_INPUTS = 4
"""Query, key and value read the same tensor one after the other; so few are compared with the next input."""
UNSEEN_ROW = 0.05
"""Count of a token that did not occur: its row matters a little, since it may occur later."""
PROBED_SHARE = 0.25
"""Part of a layer's numbers that the two factors have whose error tells its sensitivity."""


@dataclass(kw_only=True)
class InputStatistics:
    """Inputs of one layer, or of several that read the same tensor."""

    tokens: int
    """Inputs counted, padding left out."""
    second_moment: Tensor
    """``E[x^T x]``, ``(in, in)``, float64."""
    mean: Tensor
    """``E[x]``, ``(in,)``, float64."""

    def metric(self, has_bias: bool) -> Tensor:
        """Second moment of the inputs; of a layer with a bias around the mean, since the bias takes that over."""
        return self.second_moment - torch.outer(self.mean, self.mean) if has_bias else self.second_moment

    @property
    def suffices(self) -> bool:
        """Whether there were at least as many inputs as an input has numbers; else directions seem dead by chance."""
        return self.tokens >= len(self.mean)


@dataclass(kw_only=True)
class Calibration:
    """What :func:`calibrate` measured; save it, and give it to as many compressions as you like."""

    model_class: str
    inputs: dict[str, InputStatistics] = field(default_factory=dict)
    """By the name of the first layer that read them."""
    layers: dict[str, str] = field(default_factory=dict)
    """Linear layer to the name of its inputs."""
    token_counts: dict[str, Tensor] = field(default_factory=dict)
    """Embedding to the number of times that each row was read, ``(rows,)``, float64."""
    energies: dict[str, Tensor] = field(default_factory=dict)
    """Layer to the energy of its outputs along each principal direction, descending; of an embedding of its rows."""
    sensitivities: dict[str, float] = field(default_factory=dict)
    """Layer to the rise of the model's output error per squared error of its own outputs; empty if not measured."""

    def of_layer(self, name: str, in_size: int) -> InputStatistics | None:
        """The inputs of a linear layer; None if they were too few to decide anything.

        Raises:
            ValueError: If the layer was not calibrated, or has inputs of another size.
        """
        found = self.inputs.get(self.layers.get(name, ""))
        if found is None or len(found.mean) != in_size:
            what = "no inputs" if found is None else f"inputs of size {len(found.mean)}"
            raise ValueError(
                f"calibration has {what} of the layer {name!r}, but {in_size} numbers an input are needed. It was "
                f"made with another {self.model_class}, or its batches never reached that layer. Call "
                "calibrate(model, batches) with this model, or add the layer to exclude_modules."
            )
        return found if found.suffices else None

    def knows(self, name: str) -> bool:
        """Whether enough inputs of a layer were seen to judge its directions."""
        return name in self.token_counts or self.inputs[self.layers[name]].suffices

    def energies_of(self, name: str, in_size: int, out_size: int) -> Tensor:
        """Energies of a layer, ``(min(in_size, out_size),)`` float64 on the CPU.

        Raises:
            ValueError: If the layer was not calibrated, or has other sizes.
        """
        found = self.energies.get(name)
        if found is None or len(found) != min(in_size, out_size):
            what = "no energies" if found is None else f"{len(found)} energies"
            raise ValueError(
                f"calibration has {what} of the layer {name!r}, but {min(in_size, out_size)} are needed. It was made "
                f"with another {self.model_class}, or its batches never reached that layer. Call calibrate(model, "
                "batches) with this model, or add the layer to exclude_modules."
            )
        return found

    def sensitivity(self, name: str) -> float:
        """Sensitivity of a layer; of one with too few inputs to tell, the least of all.

        Raises:
            ValueError: If sensitivities were not measured.
        """
        if not self.sensitivities:
            raise ValueError(
                "calibration has no sensitivities, by which ranks are allotted to a wanted size. Call "
                "calibrate(model, batches), with sensitivities=True."
            )
        return self.sensitivities.get(name, min(self.sensitivities.values()))

    def counts_of(self, name: str, rows: int) -> Tensor:
        """How often each row of an embedding was read, ``(rows,)``.

        Raises:
            ValueError: If the embedding was not calibrated, or has another number of rows.
        """
        counts = self.token_counts.get(name)
        if counts is None or len(counts) != rows:
            what = "no counts" if counts is None else f"counts of {len(counts)} rows"
            raise ValueError(
                f"calibration has {what} of the embedding {name!r}, but {rows} are needed. It was made with another "
                f"{self.model_class}. Call calibrate(model, batches) with this model."
            )
        return counts

    def save(self, folder: str | Path) -> Path:
        """Write all of it into ``folder`` (made if need be), and return the file."""
        path = Path(folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {f"counts.{name}": counts for name, counts in self.token_counts.items()}
        tensors |= {f"energies.{name}": energies for name, energies in self.energies.items()}
        for name, found in self.inputs.items():
            tensors |= {f"moment.{name}": found.second_moment.contiguous(), f"mean.{name}": found.mean}
        facts = {
            "format": FORMAT,
            "model_class": self.model_class,
            "layers": self.layers,
            "tokens": {name: found.tokens for name, found in self.inputs.items()},
            "sensitivities": self.sensitivities,
        }
        beside = path.with_suffix(".part")
        save_file(tensors, beside, metadata={"comera": json.dumps(facts)})
        beside.replace(path)
        return path

    @classmethod
    def load(cls, folder: str | Path) -> "Calibration":
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: If there is no such file, or it is damaged or of something else.
        """
        path = Path(folder) / FILE if Path(folder).is_dir() else Path(folder)
        if not path.is_file():
            raise ValueError(
                f"calibration={str(folder)!r} has no {FILE}. Make one: calibrate(model, batches).save(folder)."
            )
        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {}).get("comera", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # no mapping
            if facts.get("format") != FORMAT:
                raise ValueError(f"format is {facts.get('format')!r}, but {FORMAT!r} is needed")
            inputs = {
                name: InputStatistics(
                    tokens=tokens, second_moment=tensors[f"moment.{name}"], mean=tensors[f"mean.{name}"]
                )
                for name, tokens in facts["tokens"].items()
            }
            counts, energies = (
                {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}
                for start in ("counts.", "energies.")
            )
            rest = {key: facts[key] for key in ("model_class", "layers", "sensitivities")}
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(
                f"{path} is no calibration, or damaged: {error}. Make it anew: calibrate(model, batches).save(folder)."
            ) from error
        return cls(inputs=inputs, token_counts=counts, energies=energies, **rest)


def calibrate(
    model: PreTrainedModel,
    batches: Iterable[Any],
    *,
    processing_class: Any = None,
    sensitivities: bool = True,
    probe_sequences: int = 256,
    max_gigabytes: float = 8.0,
) -> Calibration:
    """Measure what a decomposition of ``model`` needs to know, on inputs like those that it will be used on.

    Of a layer with n inputs about 50 n tokens are enough: 20,000 for layers 384 wide. The model runs in evaluation
    mode, without gradients and autocast; its mode is restored.

    Args:
        model: A dense model with its trained weights.
        batches: Dictionaries of what the model's ``forward`` takes, such as those of a ``DataLoader``; labels are not
            needed. Or texts, with ``processing_class``.
        processing_class: A tokenizer, for texts.
        sensitivities: Also measure how much the error of each layer counts, which a size as target needs: one
            forward pass over the probes for each layer.
        probe_sequences: Sequences that these passes run over: the first of ``batches``.
        max_gigabytes: Most memory for the second moments, 8 n^2 bytes for each distinct input.

    Returns:
        The statistics; give them to ``get_comera_model(model, comera_config, calibration=...)``.

    Raises:
        ValueError: If the model is compressed or on the meta device; if batches are empty, or lack an input of the
            model or have one that it does not take; if an input of a layer is NaN or infinite; if the memory does not
            suffice.

    Source:
        SVD-LLM, arXiv:2403.07378, section 3 (second moments of inputs).
    """
    _check_model(model)
    device, collect = next(model.parameters()).device, _Collector(model, max_gigabytes)
    probes: list[dict[str, Any]] = []
    probed = 0
    with _quiet_evaluation(model):
        for batch in tqdm(_as_batches(model, batches, processing_class), desc="calibration", unit="batch", delay=2.0):
            batch = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
            collect.run(batch)
            if sensitivities and probed < probe_sequences:
                probes.append(batch)
                probed += len(next(value for value in batch.values() if isinstance(value, Tensor)))
        calibration = collect.result()
        _measure(model, calibration, probes, sensitivities)
    return calibration


def weight_matrix(layer: Any) -> Tensor:
    """The dense matrix ``(in, out)`` of a linear layer, or the table ``(rows, columns)`` of an embedding."""
    weight = layer.weight.detach()
    return weight if isinstance(layer, Conv1D | nn.Embedding) else weight.T


def smoothed_counts(counts: Tensor) -> Tensor:
    """``counts`` as weights of rows, ``(rows,)``: those that never occurred count a little."""
    return counts + UNSEEN_ROW


def _check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model is a {type(model).__name__}, but a Transformers model is needed: "
            "calibrate(AutoModel.from_pretrained(name), batches)."
        )
    if any(isinstance(module, CompressedLayer) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is compressed already. Calibrate the dense model, before get_comera_model."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has parameters on the meta device, without values. Load it first: "
            "AutoModel.from_pretrained(name)."
        )


@contextlib.contextmanager
def _quiet_evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients and autocast; each module gets its mode back."""
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device.type
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _as_batches(model: PreTrainedModel, batches: Iterable[Any], processing_class: Any) -> Iterator[dict[str, Any]]:
    """Each batch as a dictionary that ``forward`` takes; texts are tokenised 32 at a time."""
    if isinstance(batches, str | Mapping):
        raise ValueError(
            f"batches is a {type(batches).__name__}, but a list of batches or of texts is needed, for example "
            "calibrate(model, [batch])."
        )
    taken = set(inspect.signature(model.forward).parameters)
    main = model.main_input_name
    number = -1
    for number, batch in enumerate(_tokenized(batches, processing_class)):
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"batch {number} is a {type(batch).__name__}, but a dictionary of model inputs is needed, for example "
                '{"input_ids": ..., "attention_mask": ...}; or texts, with processing_class=tokenizer.'
            )
        unknown = sorted(set(batch) - taken)
        if unknown or not {main, "inputs_embeds"} & set(batch):
            found = f"has {', '.join(unknown)}" if unknown else f"lacks {main}"
            raise ValueError(
                f"batch {number} {found}, but {type(model).__name__}.forward takes {main} and not that. Its keys are "
                f"{', '.join(map(str, batch))}. Tokenise the data, and remove columns that the model does not take."
            )
        yield dict(batch)
    if number < 0:
        raise ValueError("batches is empty. Some 1,000 sentences like those that the model will see are needed.")


def _tokenized(batches: Iterable[Any], processing_class: Any) -> Iterator[Any]:
    texts: list[str] = []
    for item in batches:
        if not isinstance(item, str):
            yield item
            continue
        if processing_class is None:
            raise ValueError("batches holds texts, so processing_class=AutoTokenizer.from_pretrained(name) is needed.")
        texts.append(item)
        if len(texts) == 32:
            yield _tokenize(texts, processing_class)
            texts = []
    if texts:
        yield _tokenize(texts, processing_class)


def _tokenize(texts: list[str], processing_class: Any) -> Any:
    longest = min(processing_class.model_max_length, 512)
    return processing_class(texts, padding=len(texts) > 1, truncation=True, max_length=longest, return_tensors="pt")


class _Collector:
    """Sums over the inputs of all linear layers and the ids of all embeddings, by hooks."""

    def __init__(self, model: PreTrainedModel, max_gigabytes: float) -> None:
        self.model, self.max_bytes = model, max_gigabytes * 1e9
        self.names: dict[nn.Module, str] = {}
        owners: dict[int, str] = {}
        for name, module in model.named_modules():
            if type(module) in COMPRESSIBLE_TYPES:
                owner = owners.setdefault(id(module.weight), name)
                if owner == name or type(module) is nn.Embedding:  # a tied head is its embedding; several are one
                    self.names[module] = owner
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}  # second moment and first, float64, on the CPU
        self.tokens: dict[str, int] = {}
        self.layers: dict[str, str] = {}
        self.counts: dict[str, Tensor] = {}
        self.recent: deque[tuple[Tensor, str]] = deque(maxlen=RECENT_INPUTS)
        self.masks: dict[str, Tensor] = {}

    def run(self, batch: dict[str, Any]) -> None:
        """One forward pass, watched."""
        self.masks = {
            key: value.bool()
            for key, value in batch.items()
            if key.endswith("attention_mask") and isinstance(value, Tensor) and value.dim() == 2
        }
        handles = [module.register_forward_pre_hook(self._see) for module in self.names]
        try:
            self.model(**batch)
        finally:
            self.recent.clear()
            for handle in handles:
                handle.remove()

    def _see(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor):
            return
        name, x = self.names[module], args[0]
        if type(module) is nn.Embedding:
            rows = module.num_embeddings
            ids = self._real(name, x).flatten()
            counts = self.counts.setdefault(name, torch.zeros(rows, dtype=torch.float64))
            counts += torch.bincount(ids, minlength=rows).cpu()
            return
        leader = next((owner for seen, owner in self.recent if seen is x), None)
        if leader is not None and self.layers.get(name, leader) == leader:
            self.layers[name] = leader
            return
        self.recent.append((x, name))
        self.layers[name] = name  # also where a layer has shared its inputs in earlier batches, but does no longer
        self._add(name, self._real(name, x, features=True).float())

    def _add(self, name: str, x: Tensor) -> None:
        moment, first = (x.T @ x).double().cpu(), x.sum(0, dtype=torch.float64).cpu()
        if not torch.isfinite(moment).all():
            raise ValueError(
                f"The inputs of the layer {name!r} hold NaN or infinity. Look for such values in the batches and in "
                "the checkpoint, and load a model that overflows in float16 in bfloat16 or float32."
            )
        if name in self.sums:
            self.sums[name][0].add_(moment)
            self.sums[name][1].add_(first)
        else:
            self.sums[name] = (moment, first)
            self._check_memory()
        self.tokens[name] = self.tokens.get(name, 0) + len(x)

    def _check_memory(self) -> None:
        held = sum(8 * moment.numel() for moment, _ in self.sums.values())
        if held > self.max_bytes:
            raise ValueError(
                f"max_gigabytes={self.max_bytes / 1e9:g} do not hold the second moments: {len(self.sums)} inputs take "
                f"{held / 1e9:.2f} GB, and there are more. Raise it if there is memory; or compress fewer layers."
            )

    def _real(self, name: str, x: Tensor, features: bool = False) -> Tensor:
        """``x`` without padding, one row an input: by the mask of its shape, if there is one."""
        lead = x.shape[:-1] if features else x.shape
        flat = x.reshape(-1, x.shape[-1]) if features else x.reshape(-1)
        for mask in self._masks_for(name):
            if lead == mask.shape or lead == (mask.numel(),):
                return flat[mask.flatten()]
        return flat

    def _masks_for(self, name: str) -> list[Tensor]:
        """Masks of the batch, those of the side of the model first where ``name`` stands."""
        own = "decoder_attention_mask" if "decoder" in name and not _reads_encoder(name) else "attention_mask"
        if own == "decoder_attention_mask" and getattr(self.model.config, "is_encoder_decoder", False):
            return [self.masks[own]] if own in self.masks else []
        return [mask for key, mask in sorted(self.masks.items(), key=lambda item: item[0] != own)]

    def result(self) -> Calibration:
        """The sums as means."""
        leaders = set(self.layers.values())
        inputs = {
            name: InputStatistics(tokens=max(n, 1), second_moment=moment / max(n, 1), mean=first / max(n, 1))
            for name, (moment, first) in self.sums.items()
            if name in leaders and (n := self.tokens[name]) >= 0
        }
        return Calibration(
            model_class=type(self.model).__name__, inputs=inputs, layers=self.layers, token_counts=self.counts
        )


def _reads_encoder(name: str) -> bool:
    """Whether a layer of a decoder projects the encoder's states: keys and values of cross-attention."""
    cross = any(part in name for part in ("encoder_attn", "EncDecAttention", "crossattention", "cross_attn"))
    return cross and name.rpartition(".")[2] in ("k", "v", "k_proj", "v_proj", "key", "value", "c_attn")


def _measure(
    model: PreTrainedModel, calibration: Calibration, probes: Sequence[dict[str, Any]], sensitivities: bool
) -> None:
    """Fill in the energies of all layers, and how much the output suffers from two factors in place of each."""
    reference = [_outputs(model, batch) for batch in probes]
    names = [*calibration.token_counts, *calibration.layers]
    for name in tqdm(names, desc="sensitivity" if sensitivities else "energies", unit="layer", delay=2.0):
        layer: Any = model.get_submodule(name)
        energies, approximation, shift = _probe(name, layer, calibration)
        calibration.energies[name] = energies
        rank = _probed_rank(layer)
        error = energies[rank:].sum().item()
        if not sensitivities or not calibration.knows(name):
            continue
        with _replaced(layer, approximation, shift):
            risen = [_distance(_outputs(model, batch), exact) for batch, exact in zip(probes, reference, strict=True)]
        calibration.sensitivities[name] = sum(risen) / len(risen) / error if error > 0 else 0.0


def _probed_rank(layer: Any) -> int:
    return max(1, int(PROBED_SHARE * layer.weight.numel() / sum(layer.weight.shape)))


def _probe(name: str, layer: Any, calibration: Calibration) -> tuple[Tensor, Tensor, Tensor | None]:
    """Energies of a layer, an approximation of its weight in the shape of the weight, and the shift of its bias."""
    matrix, rank = weight_matrix(layer).double(), _probed_rank(layer)
    if isinstance(layer, nn.Embedding):
        weights = smoothed_counts(calibration.token_counts[name]).to(matrix)
        weights /= weights.sum()
        weighted = matrix * weights.sqrt()[:, None]
        energies = torch.linalg.svdvals(weighted.T @ weighted)[: min(matrix.shape)].cpu()
        left, right = low_rank_factors(matrix, rank, weights)
        return energies, left @ right, None
    inputs = calibration.inputs[calibration.layers[name]]
    spectrum = OutputSpectrum(matrix, inputs.metric(layer.bias is not None) if inputs.suffices else _identity(matrix))
    left, right = spectrum.factors(rank)
    shift = inputs.mean.to(matrix) @ (matrix - left @ right)
    product = left @ right
    return spectrum.energies.cpu(), product if isinstance(layer, Conv1D) else product.T, shift


def _identity(matrix: Tensor) -> Tensor:
    return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


@contextlib.contextmanager
def _replaced(layer: Any, weight: Tensor, shift: Tensor | None) -> Iterator[None]:
    """Other values of a layer's weight and bias for a while."""
    kept, bias = layer.weight.data, getattr(layer, "bias", None)
    kept_bias = None if bias is None else bias.data
    layer.weight.data = weight.to(kept)
    if bias is not None and shift is not None:
        bias.data = bias.data + shift.to(bias.data)
    try:
        yield
    finally:
        layer.weight.data = kept
        if bias is not None:
            bias.data = kept_bias


def _outputs(model: PreTrainedModel, batch: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Logits, or else hidden states, and the mask of the positions that count."""
    outputs = model(**batch)
    values = outputs.get("logits") if isinstance(outputs, Mapping) else None
    values = outputs[0] if values is None else values
    masks = [batch.get(key) for key in ("decoder_attention_mask", "attention_mask")]
    mask = next((m for m in masks if isinstance(m, Tensor) and m.shape == values.shape[:-1]), None)
    return values.float(), mask


def _distance(found: tuple[Tensor, Tensor | None], exact: tuple[Tensor, Tensor | None]) -> float:
    """Mean over positions of the squared difference, over the mean square of the exact values."""
    difference = (found[0] - exact[0]).square().sum(-1)
    size = exact[0].square().sum(-1)
    if exact[1] is not None:
        difference, size = difference * exact[1], size * exact[1]
    ratio = difference.sum().double() / size.sum().double()
    return ratio.item() if math.isfinite(ratio.item()) else math.inf
