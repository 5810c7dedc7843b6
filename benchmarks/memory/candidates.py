"""What the memory benchmark compares: a model in one form, with a policy and an optimizer; and what it takes."""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from benchmarks.harness.process import in_own_process
from benchmarks.harness.timing import saved_for_backward
from hf_comera import (
    ActivationPolicy,
    CoatAdamW,
    ComeraConfig,
    TTMuon,
    comera_param_groups,
    get_comera_model,
    set_activation_policy,
)
from loop.measure import TENSOR_TRAIN
from loop.memory import bytes_by_kind, largest_growth
from mnli.model import TARGETS, paper_shapes, six_encoders

__all__ = [
    "POLICIES",
    "WORKLOADS",
    "Candidate",
    "Memory",
    "Training",
    "Workload",
    "make_optimizer",
    "measure_apart",
    "why_absent",
]
_BERT = {"model_class": BertForSequenceClassification}
_GPT2 = {"model_class": GPT2LMHeadModel}
_LLAMA = {"model_class": LlamaForCausalLM}
LR = 1e-4
PROJECTION = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
"""GaLore's, as in its examples."""
PACKAGES = {"galore": "galore_torch", "galore, embedding too": "galore_torch", "adamw8bit": "bitsandbytes"}
POLICIES: dict[str, str | ActivationPolicy] = {
    "keep": "keep",
    "rank": "rank",
    "rank, attention again": ActivationPolicy(attention="recompute"),
    "rank+fp8": "rank+fp8",
    "rank+fp8, attention kept": ActivationPolicy(storage="fp8"),
    "fp8": "fp8",
}
"""By the name that rows have."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with random weights and its batch."""

    model_class: type[PreTrainedModel]
    config: Callable[[float], PreTrainedConfig]
    """From the dropout."""
    compression: Callable[[], ComeraConfig]
    length: int
    """Tokens a sequence."""

    def build(self, form: str, dropout: float) -> PreTrainedModel:
        """The model in one of its forms, in training mode."""
        config = self.config(dropout)
        if form == TENSOR_TRAIN:
            return get_comera_model(self.model_class, self.compression(), config=config).train()
        return self.model_class(config).train()

    def batch(self, sequences: int, device: torch.device) -> dict[str, Tensor]:
        """Always the same random tokens, without padding; classes to learn, or the tokens themselves."""
        config = self.config(0.0)
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (sequences, self.length), generator=random)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        if self.model_class is BertForSequenceClassification:
            batch["labels"] = torch.randint(config.num_labels, (sequences,), generator=random)
        return {name: tensor.to(device) for name, tensor in batch.items()}


def _bert(dropout: float) -> BertConfig:
    return six_encoders(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)


def _gpt2(width: int, layers: int, vocabulary: int) -> Callable[[float], GPT2Config]:
    def config(dropout: float) -> GPT2Config:
        shape = {"n_embd": width, "n_layer": layers, "n_head": width // 64, "vocab_size": vocabulary}
        ids = {"bos_token_id": None, "eos_token_id": None}
        return GPT2Config(**shape, **ids, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False)

    return config


def _llama(width: int, layers: int, vocabulary: int) -> Callable[[float], LlamaConfig]:
    def config(dropout: float) -> LlamaConfig:
        shape = {"hidden_size": width, "intermediate_size": 11 * width // 4, "num_hidden_layers": layers}
        heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}
        return LlamaConfig(**shape, **heads, vocab_size=vocabulary, attention_dropout=dropout, use_cache=False)

    return config


def _tiny_bert(dropout: float) -> BertConfig:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 1000}
    return six_encoders(
        **shape, num_hidden_layers=2, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )


WORKLOADS = {
    "bert-6x768": Workload(**_BERT, config=_bert, compression=paper_shapes, length=128),
    "gpt2-24x1024": Workload(**_GPT2, config=_gpt2(1024, 24, 50257), compression=ComeraConfig, length=512),
    "llama-8x1024": Workload(**_LLAMA, config=_llama(1024, 8, 32000), compression=ComeraConfig, length=2048),
    "bert-tiny": Workload(
        **_BERT, config=_tiny_bert, compression=lambda: ComeraConfig(target_modules=TARGETS, rank=8), length=64
    ),
    "gpt2-tiny": Workload(**_GPT2, config=_gpt2(64, 2, 1000), compression=lambda: ComeraConfig(rank=8), length=128),
    "llama-tiny": Workload(**_LLAMA, config=_llama(64, 2, 1000), compression=lambda: ComeraConfig(rank=8), length=256),
}
"""By the name that rows have."""


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """The optimizer of all parameters of ``model``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # GaLore's AdamW calls itself deprecated
        return _MAKERS[name](model)


def why_absent(name: str) -> str | None:
    """What is missing for this optimizer; None if it can be made."""
    package = PACKAGES.get(name)
    if package is None:
        return None
    try:
        importlib.import_module(package)
    except Exception as problem:  # a package that does not fit this machine may raise anything
        pip_name = package.replace("_", "-")
        return f"{package} cannot be imported ({problem}); pip install {pip_name}"
    return None


def _adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(comera_param_groups(model, LR), lr=LR, fused=True)


def _coat_adamw(model: nn.Module) -> Optimizer:
    return CoatAdamW(comera_param_groups(model, LR), lr=LR)


def _tt_muon(model: nn.Module) -> Optimizer:
    return TTMuon(model, LR)


def _adamw_8bit(model: nn.Module) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=LR)


def _galore(model: nn.Module, kinds: tuple[type[nn.Module], ...] = (nn.Linear,)) -> Optimizer:
    """GaLore's AdamW: moments of projected gradients for the weights of layers of these kinds."""
    from galore_torch import GaLoreAdamW

    projected = [
        module.weight
        for module in model.modules()
        if isinstance(module, kinds) and min(module.weight.shape) > PROJECTION["rank"]
    ]
    known = set(map(id, projected))
    others = [parameter for parameter in model.parameters() if id(parameter) not in known]
    groups = [{"params": others}, *([{"params": projected, **PROJECTION}] if projected else [])]
    return GaLoreAdamW(groups, lr=LR)


_MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw_8bit,
    "coat_adamw": _coat_adamw,
    "galore": _galore,
    "galore, embedding too": lambda model: _galore(model, (nn.Linear, nn.Embedding)),
    "tt_muon": _tt_muon,
}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Plain values, so that another process can be told; names are those of the columns of the rows."""

    model: str
    sequences: int
    form: str
    policy: str
    dropout: float = 0.0
    optimizer: str = ""
    """An optimizer of ``_MAKERS``, or none for forward and backward alone."""

    def case(self) -> dict[str, str | float]:
        """The columns that name the row."""
        return {
            "model": self.model,
            "tokens": f"{self.sequences}x{WORKLOADS[self.model].length}",
            "dropout": self.dropout,
            "form": self.form,
            "policy": self.policy,
            "optimizer": self.optimizer,
        }


class Training:
    """The model of a candidate with its batch, one step at a time.

    Args:
        candidate: What to build.
        device: Where.
        model: Used instead of a new one; its policy is set.
    """

    def __init__(self, candidate: Candidate, device: torch.device, model: PreTrainedModel | None = None) -> None:
        workload = WORKLOADS[candidate.model]
        torch.manual_seed(0)
        self.device = device
        self.model = model or workload.build(candidate.form, candidate.dropout).to(device)
        self.batch = workload.batch(candidate.sequences, device)
        self.optimizer = make_optimizer(candidate.optimizer, self.model) if candidate.optimizer else None
        self.policy = POLICIES[candidate.policy]

    def loss(self) -> Tensor:
        """Forward."""
        set_activation_policy(self.model, self.policy)  # the model may be shared
        return self.model(**self.batch).loss

    def backward(self) -> None:
        """Forward and backward."""
        self.loss().backward()

    def update(self) -> None:
        """The optimizer's step, if there is one, after which gradients are let go."""
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def step(self) -> None:
        """All of it."""
        self.backward()
        self.update()

    def gradient(self) -> Tensor:
        """All entries of all gradients in one row, of the same random numbers at every call."""
        torch.manual_seed(1)
        self.backward()
        gradient = _joined(self.model)
        self.model.zero_grad()
        return gradient


def _joined(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes in use for one candidate."""

    weights: int
    gradients: int
    optimizer: int
    saved: int
    """By autograd, from forward to backward."""
    growth: int | None
    """The most that was in use during a step, less what was before it: the largest of a few steps."""
    measured_by: str
    """See :class:`loop.memory.Growth`."""

    @property
    def parts(self) -> dict[str, int]:
        """What a training has in memory, by kind."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.saved,
        }

    @property
    def peak(self) -> int | None:
        """Of the whole training: what is there between two steps, and what a step adds."""
        return None if self.growth is None else self.weights + self.optimizer + self.growth


def measure_apart(candidate: Candidate, device: str, threads: int) -> Memory:
    """Measure in a new process, one that has not computed anything."""
    return in_own_process(threads, measure, candidate, device)


def measure(candidate: Candidate, device_name: str) -> Memory:
    """Measure here: one step that is not counted, so that the optimizer has its state, then the others."""
    device = torch.device(device_name)
    training = Training(candidate, device)
    training.backward()
    gradients = bytes_by_kind(training.model, []).gradients
    training.update()
    sizes = bytes_by_kind(training.model, [training.optimizer] if training.optimizer else [])
    saved = saved_for_backward(training.loss, training.model.parameters())
    growth = largest_growth(training.step, device)
    return Memory(
        weights=sizes.weights,
        gradients=gradients,
        optimizer=sizes.optimizer,
        saved=saved,
        growth=growth.num_bytes,
        measured_by=growth.measured_by,
    )
