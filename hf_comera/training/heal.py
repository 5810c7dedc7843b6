"""Healing: a compressed model learns, without labels, to give what the dense model gives that it was made from."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler
from transformers import DataCollatorWithPadding, PreTrainedModel, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from hf_comera.hub.model import is_comera_model
from hf_comera.modules.head_and_loss import LANGUAGE_MODELS, HeadAndLoss, head_left_out
from hf_comera.ops.fused_loss import IGNORED
from hf_comera.training import distillation
from hf_comera.training.trainer import ComeraTrainer

__all__ = ["HealingArguments", "HealingTrainer"]

Objective = Literal["auto", "embedding", "tokens", "classes"]
Pooling = Literal["mean", "cls"]
Schedule = Literal["cosine", "linear"]


@dataclass
class HealingArguments(TrainingArguments):
    """Arguments of a :class:`HealingTrainer`: those of the Trainer, some with other defaults, and those of the losses.

    Attributes:
        objective: What the model is for: "embedding" (a bare encoder), "tokens" (a language model), "classes" (a
            classifier), or "auto": found from its class.
        pooling: How an encoder's tokens become an embedding: "mean" or "cls", the first token.
        similarity_weight: Weight of the similarities between sentences of a batch, for embeddings.
        hidden_weight: Weight of the hidden states of all layers, at the first step. It falls to 0 over the run.
        hidden_schedule: How it falls: "cosine" or "linear".
        top_k: How many of the teacher's likeliest tokens are compared one by one; all others are one class.
        temperature: Logits are divided by it.
        student_dropout: Whether the student's dropout stays on; the teacher has none.
        max_length: Tokens of a text, where texts are given.

    Raises:
        ValueError: If a value is out of range.
    """

    learning_rate: float = field(default=5e-4, metadata={"help": "The rate, small: the run starts near its end."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "The schedule of the learning rate."})
    warmup_steps: float = field(default=0.05, metadata={"help": "Steps of warm-up; below 1, a share of all steps."})
    per_device_train_batch_size: int = field(default=64, metadata={"help": "Sentences of a batch, on each device."})
    objective: Objective = field(
        default="auto", metadata={"help": "What the model is for: embedding, tokens, classes; auto: from its class."}
    )
    pooling: Pooling = field(default="mean", metadata={"help": "How an encoder's tokens become an embedding."})
    similarity_weight: float = field(
        default=1.0, metadata={"help": "Weight of the similarities between the sentences of a batch."}
    )
    hidden_weight: float = field(
        default=1.0, metadata={"help": "Weight of the hidden states at the first step; it falls to 0 over the run."}
    )
    hidden_schedule: Schedule = field(default="cosine", metadata={"help": "How the weight of hidden states falls."})
    top_k: int = field(default=64, metadata={"help": "How many of the teacher's tokens are compared one by one."})
    temperature: float = field(default=1.0, metadata={"help": "Logits are divided by it."})
    student_dropout: bool = field(default=False, metadata={"help": "Whether the student's dropout stays on."})
    max_length: int = field(default=128, metadata={"help": "Tokens of a text, where texts are given."})

    def __post_init__(self) -> None:
        """Check the values, beside what the Trainer checks."""
        for name, kind, usual in (
            ("objective", Objective, "auto"), ("pooling", Pooling, "mean"), ("hidden_schedule", Schedule, "cosine"),
        ):  # fmt: skip
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(map(repr, get_args(kind)))
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {known}. Use for example {usual!r}.")
        for name in ("similarity_weight", "hidden_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number of at least 0, for example 1.0.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be a number above 0, for example 1.0.")
        for name, example in (("top_k", 64), ("max_length", 128)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1, for example {example}.")
        super().__post_init__()


class HealingTrainer(ComeraTrainer):
    """Distils a compressed model from the dense model that it was made from. No labels are needed.

    The loss depends on what the model is for:

    - a bare encoder (``AutoModel``): ``1 - cos`` of pooled embeddings, and the similarities between the sentences of a
      batch;
    - a masked, causal or sequence-to-sequence language model: the divergence of the likeliest tokens, at all tokens.
      With labels, it is at masked tokens, or at the tokens of the target;
    - a classifier: the divergence of the classes.

    To each are added the hidden states of all layers, with a weight that falls to 0 over the run. Logs and
    evaluations report each loss by its name. ``eval_loss`` is without the hidden states, so that steps compare.

    The teacher is put on the device of the student and into evaluation mode; it keeps its dtype, and no gradients are
    computed for it. Ranks are cut on the way with ``rank_adaptation``, and runs resume exactly, as in
    :class:`ComeraTrainer`.

    Args:
        model: The student.
        teacher: The dense model. ``get_comera_model(model, ...)`` works in place: load it once more, or copy it first.
        args: A :class:`HealingArguments`.
        train_dataset: A list of texts, or any dataset of model inputs. Texts are tokenized, and go into batches of
            similar lengths.
        eval_dataset: The same, or a dict of such.
        processing_class: The tokenizer; needed for texts.
        kwargs: Of :class:`ComeraTrainer`.

    Raises:
        ValueError: If student and teacher have other vocabularies, sizes or classes. If the teacher is compressed, or
            shares parameters with the student. If it is not known what the model is for. If texts are empty, or come
            without a tokenizer. For ``cuda_graphs``.

    Source:
        Hinton et al., arXiv:1503.02531 (logits); TinyBERT, arXiv:1909.10351 (hidden states).
    """

    args: HealingArguments

    def __init__(
        self,
        model: PreTrainedModel,
        teacher: PreTrainedModel,
        args: HealingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, HealingArguments):
            raise ValueError(
                f"args is a {type(args).__name__}, but healing has settings of its own. Use for example "
                'HealingArguments("healed"), which takes all that TrainingArguments takes.'
            )
        _check_models(model, teacher, args)
        self.objective: str = _objective(model) if args.objective == "auto" else args.objective
        _check_sizes(model, teacher, args, self.objective)
        if kwargs.get("cuda_graphs"):
            raise ValueError(
                "cuda_graphs=True: a graph would hold the weight of the hidden states fast, which falls at each step. "
                "Use cuda_graphs=False."
            )
        if kwargs.get("compute_metrics") is not None and self.objective == "tokens":
            raise ValueError(
                "compute_metrics needs predictions, but logits of a language model are never whole here. Leave it "
                "out, or evaluate with a plain Trainer."
            )
        if _is_texts(train_dataset) and kwargs.get("data_collator") is None:
            _check_tokenizer(processing_class)
            kwargs["data_collator"] = DataCollatorWithPadding(processing_class)
        self._tokenizer, self._max_length = processing_class, args.max_length
        super().__init__(
            model=model,
            args=args,
            train_dataset=self._tokenized(train_dataset, "train_dataset"),
            eval_dataset=self._tokenized(eval_dataset, "eval_dataset"),
            processing_class=processing_class,
            **kwargs,
        )
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True  # we divide by what was accumulated
        self.teacher = teacher.eval()
        if self.place_model_on_device and getattr(teacher, "hf_device_map", None) is None:
            self.teacher = self.teacher.to(self.args.device)
        blocks = (HeadAndLoss.of(one) if self.objective == "tokens" else "" for one in (model, teacher))
        self._student_block, self._teacher_block = (None if isinstance(block, str) else block for block in blocks)
        self._recorded: dict[str, _Mean] = {}

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, from the beginning or from a checkpoint, as :meth:`ComeraTrainer.train` does."""
        with contextlib.nullcontext() if self.args.student_dropout else no_dropout(self.model):
            return super().train(*args, **kwargs)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The losses on a list of texts or a dataset, by name."""
        return super().evaluate(self._tokenized(eval_dataset, "eval_dataset"), *args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of one batch, divided by what ``num_items_in_batch`` counts over all that are accumulated."""
        share = self.state.global_step / max(self.state.max_steps, 1)
        hidden_weight = self.args.hidden_weight * falling(share, self.args.hidden_schedule)
        losses, predictions = self._losses(model, inputs, with_hidden=hidden_weight > 0)
        weights = {**self._weights, "hidden_loss": hidden_weight}
        loss: Tensor | float = 0.0
        for name, values in losses.items():
            self._recorded.setdefault(name, _Mean()).add(values.detach().sum(), values.numel())
            if num_items_in_batch is None:
                loss = loss + weights[name] * values.mean()
            else:  # DDP takes the mean over processes
                total = num_items_in_batch[1 if name == "token_loss" else 0]
                loss = loss + weights[name] * self.accelerator.num_processes * values.sum() / total
        return (loss, {"logits": predictions}) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """One batch of an evaluation; predictions are embeddings, or logits of classes."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            losses, predictions = self._losses(model, inputs, with_hidden=self.args.hidden_weight > 0)
        size = _num_sentences(inputs)
        for name, values in losses.items():
            places = torch.arange(size, device=values.device)
            if name == "token_loss":
                places = chosen_tokens(inputs, self._bare_student(model)).nonzero()[:, 0]
            sums = values.new_zeros(size, 2).index_add(0, places, torch.stack([values, torch.ones_like(values)], 1))
            sums = self.accelerator.gather_for_metrics(sums)  # without those that fill up the last batch
            self._recorded.setdefault(name, _Mean()).add(*sums.sum(0))
        loss = torch.stack([weight * losses[name].mean() for name, weight in self._weights.items()]).sum()
        if prediction_loss_only:
            return loss, None, None
        return loss, predictions, inputs.get("labels")

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """An evaluation, with the mean of each loss among its metrics."""
        of_training, self._recorded = self._recorded, {}
        try:
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)  # type: ignore[misc]
            means = self._means()
        finally:
            self._recorded = of_training
        total = sum(weight * means[name] for name, weight in self._weights.items())
        own = {f"{metric_key_prefix}_loss": total}  # the Trainer's own counts the batches alike
        named = {f"{metric_key_prefix}_{name}": mean for name, mean in means.items()}
        return output._replace(metrics={**(output.metrics or {}), **own, **named})

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Record ``logs``, and with the training loss the mean of each loss since the last record."""
        if "loss" in logs:
            logs = {**logs, **self._means()}
            self._recorded = {}
        super().log(logs, *args, **kwargs)

    @property
    def _weights(self) -> dict[str, float]:
        """Of the losses of the objective: those that stay until the end of the run."""
        if self.objective == "embedding":
            similarity = self.args.similarity_weight
            return {"embedding_loss": 1.0, **({"similarity_loss": similarity} if similarity > 0 else {})}
        return {"token_loss": 1.0} if self.objective == "tokens" else {"class_loss": 1.0}

    def _bare_student(self, model: nn.Module) -> PreTrainedModel:
        bare: PreTrainedModel = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        return bare

    def _means(self) -> dict[str, float]:
        """Of the recorded losses, over all processes."""
        names = sorted(self._recorded)
        if not names:
            return {}
        sums = torch.stack([self._recorded[name].as_tensor() for name in names])
        sums = self.accelerator.reduce(sums, "sum").tolist()
        return {name: total / max(count, 1) for name, (total, count) in zip(names, sums, strict=True)}

    def _losses(
        self, model: nn.Module, inputs: dict[str, Any], *, with_hidden: bool
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Values of each loss, one for each sentence or token; and predictions, but for language models."""
        options = {name: value for name, value in inputs.items() if name not in LABELS}
        student = self._bare_student(model)
        if student.config.is_encoder_decoder and not {"decoder_input_ids", "decoder_inputs_embeds"} & options.keys():
            chosen_tokens(inputs, student)  # says what is missing
            of_labels: Any = student.prepare_decoder_input_ids_from_labels
            options["decoder_input_ids"] = of_labels(labels=inputs["labels"])
        options |= {"output_hidden_states": with_hidden, "return_dict": True}
        if student.config.is_encoder_decoder or self.objective == "tokens":
            options["use_cache"] = False
        with head_left_out(student, self._student_block) as student_head:
            ours = model(**options)
        with torch.no_grad(), self.accelerator.autocast():
            with head_left_out(self.teacher, self._teacher_block) as teacher_head:
                wanted = self.teacher(**options)
        mask, losses = options.get("attention_mask"), {}
        if with_hidden:
            decoder_mask = chosen_tokens(inputs, student) if student.config.is_encoder_decoder else None
            losses["hidden_loss"] = _hidden_losses(ours, wanted, mask, decoder_mask)
        if self.objective == "embedding":
            embeddings = [
                distillation.pool(_field(outputs, "last_hidden_state", self.objective), mask, self.args.pooling)
                for outputs in (ours, wanted)
            ]
            losses["embedding_loss"] = distillation.cosine_distance(*embeddings)
            if "similarity_loss" in self._weights:
                losses["similarity_loss"] = distillation.similarity_difference(*embeddings)
            return losses, embeddings[0]
        logits, wanted_logits = (_field(outputs, "logits", self.objective) for outputs in (ours, wanted))
        if self.objective == "classes":
            values = distillation.class_divergence(logits, wanted_logits, self.args.temperature)
            losses["class_loss"] = values if values.dim() == 1 else distillation.mean_of_tokens(values, mask)
            return losses, logits
        places = chosen_tokens(inputs, student)
        with self.accelerator.autocast():
            losses["token_loss"] = distillation.head_divergence(
                logits[places], student_head, wanted_logits[places], teacher_head,
                self.teacher.config.get_text_config().vocab_size,
                top_k=self.args.top_k, temperature=self.args.temperature,
            )  # fmt: skip
        return losses, None

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Tensor | None:
        """Sentences, and tokens that the loss is taken at, over all batches that are accumulated and all processes."""
        if not batch_samples:
            return None
        student = self._bare_student(self.model)
        counts = torch.zeros(2)
        for batch in batch_samples:
            counts[0] += _num_sentences(batch)
            if self.objective == "tokens":
                counts[1] += chosen_tokens(batch, student).sum()
        reduced: Tensor = self.accelerator.reduce(counts.to(device), "sum")
        return reduced

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if isinstance(dataset, _Texts) and self.args.train_sampling_strategy == "random":
            group = self.args.train_batch_size * self.args.world_size
            return _ByLength(dataset.lengths, group, self.args.data_seed or self.args.seed)
        sampler: Sampler[int] | None = super()._get_train_sampler(train_dataset)
        return sampler

    def _tokenized(self, dataset: Any, setting: str) -> Any:
        """Texts as a dataset of model inputs; anything else as it is."""
        if isinstance(dataset, dict):
            return {name: self._tokenized(one, f"{setting}[{name!r}]") for name, one in dataset.items()}
        if isinstance(dataset, Sequence) and not isinstance(dataset, str) and not len(dataset):
            raise ValueError(f"{setting} is empty. Give at least one text, for example ['A sentence.'], or None.")
        if not _is_texts(dataset):
            return dataset
        _check_tokenizer(self._tokenizer)
        return _Texts(dataset, self._tokenizer, self._max_length, setting)


LABELS = ("labels", "label", "label_ids", "shift_labels")
"""Inputs that no model is given: no loss of labels is computed."""


def _num_sentences(batch: dict[str, Any]) -> int:
    return len(next(value for value in batch.values() if isinstance(value, Tensor)))


def falling(share: float, schedule: str) -> float:
    """From 1 at the first step to 0 at the end of the run, of which ``share`` is done."""
    share = min(max(share, 0.0), 1.0)
    return 1 - share if schedule == "linear" else (1 + math.cos(math.pi * share)) / 2


def chosen_tokens(batch: dict[str, Any], model: PreTrainedModel) -> Tensor:
    """Where a language model is compared with its teacher.

    A masked model with labels: at masked tokens. A sequence-to-sequence model with labels: at the tokens of the
    target. All others: at all that is no padding.

    Shape:
        ``(B, T)``, bool.

    Raises:
        ValueError: If the batch has neither.
    """
    labels, prefix = batch.get("labels"), "decoder_" if model.config.is_encoder_decoder else ""
    if labels is not None and (prefix or type(model).__name__.endswith("ForMaskedLM")):
        return labels != IGNORED
    mask = batch.get(f"{prefix}attention_mask")
    if f"{prefix}input_ids" not in batch:
        raise ValueError(
            f"A batch for {type(model).__name__} has {', '.join(batch)}, but {prefix}input_ids"
            + (" or labels are needed. Use a dataset of model inputs with labels." if prefix else " are needed.")
        )
    return torch.ones_like(batch[f"{prefix}input_ids"], dtype=torch.bool) if mask is None else mask != 0


@contextlib.contextmanager
def no_dropout(model: nn.Module) -> Iterator[None]:
    """Within, rates of dropout that modules of ``model`` hold are 0: of elements, attention, paths and layers.

    Rates that a forward reads from the config stay, as few do.
    """
    changed = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if type(value) is float and value > 0 and ("drop" in name or isinstance(module, nn.modules.dropout._DropoutNd))
    ]
    for module, name, _ in changed:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


class _Mean:
    """Of values that come in parts; it waits for no device."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.count: Tensor | int = 0

    def add(self, total: Tensor, count: Tensor | int) -> None:
        self.total, self.count = self.total + total, self.count + count

    def as_tensor(self) -> Tensor:
        total = torch.as_tensor(self.total)
        return torch.stack([total, torch.as_tensor(self.count, dtype=total.dtype, device=total.device)])


class _Texts(Dataset[dict[str, list[int]]]):
    """Tokenized texts, four bytes a token."""

    def __init__(self, texts: Sequence[str], tokenizer: Any, max_length: int, setting: str) -> None:
        for i, text in enumerate(texts):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(
                    f"{setting}[{i}]={text!r} is no text. Leave such entries out, for example "
                    "[text for text in texts if text.strip()]."
                )
        options = {"truncation": True, "max_length": min(max_length, tokenizer.model_max_length)}
        batches = (list(texts[start : start + 1000]) for start in range(0, len(texts), 1000))
        ids = (one for batch in batches for one in tokenizer(batch, **options)["input_ids"])
        parts = [torch.tensor(one, dtype=torch.int32) for one in ids]
        self.lengths = [len(part) for part in parts]
        if 0 in self.lengths:
            i = self.lengths.index(0)
            raise ValueError(f"{setting}[{i}]={texts[i]!r} has no token. Leave it out.")
        self._ids, self._ends = torch.cat(parts), torch.tensor(self.lengths).cumsum(0).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        end = self._ends[index]
        return {"input_ids": self._ids[end - self.lengths[index] : end].tolist()}


class _ByLength(Sampler[int]):
    """Random batches of similar lengths in a random order, the same for a seed and an epoch wherever a run resumes."""

    POOL = 50
    """Batches that are sorted together."""

    def __init__(self, lengths: list[int], batch: int, seed: int) -> None:
        self.lengths, self.batch, self.seed, self.epoch = torch.tensor(lengths), batch, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch)
        order = torch.randperm(len(self), generator=generator)
        full = len(order) // self.batch * self.batch  # a batch that is not full has to be the last
        pools = order[:full].split(self.batch * self.POOL)
        by_length = [pool[self.lengths[pool].argsort(stable=True)] for pool in pools]
        batches = torch.cat(by_length).view(-1, self.batch)
        batches = batches[torch.randperm(len(batches), generator=generator)]
        yield from torch.cat((batches.flatten(), order[full:])).tolist()


def _is_texts(dataset: Any) -> bool:
    is_list = isinstance(dataset, Sequence) and not isinstance(dataset, str)
    return is_list and len(dataset) > 0 and isinstance(dataset[0], str)


def _check_tokenizer(tokenizer: Any) -> None:
    if tokenizer is None:
        raise ValueError(
            "processing_class=None, but texts need a tokenizer. Use for example "
            "processing_class=AutoTokenizer.from_pretrained(...), the one of the teacher."
        )
    if tokenizer.pad_token is None:
        raise ValueError(
            f"processing_class: {type(tokenizer).__name__} has no token for padding. Set for example "
            "tokenizer.pad_token = tokenizer.eos_token."
        )


def _objective(model: PreTrainedModel) -> str:
    """What a model is for, by the name of its class."""
    name = type(model).__name__
    if name.endswith(LANGUAGE_MODELS) and model.get_output_embeddings() is not None:
        return "tokens"
    if name.endswith("Classification"):
        return "classes"
    is_bare = name in MODEL_MAPPING_NAMES.values() or name.endswith("EncoderModel")
    if is_bare and (not model.config.is_encoder_decoder or name.endswith("EncoderModel")):
        return "embedding"
    raise ValueError(
        f"objective='auto': it is not known what {name} is for. Bare encoders (AutoModel), language models "
        "(AutoModelForMaskedLM, AutoModelForCausalLM, AutoModelForSeq2SeqLM) and classifiers "
        "(AutoModelForSequenceClassification) are. If its outputs have last_hidden_state, use objective='embedding'; "
        "if they have logits of classes, objective='classes'."
    )


def _check_models(model: Any, teacher: Any, args: HealingArguments) -> None:
    for name, one in (("model", model), ("teacher", teacher)):
        if not isinstance(one, nn.Module) or not hasattr(one, "config"):
            raise ValueError(f"{name} is a {type(one).__name__}, but a model of Transformers is needed.")
    if is_comera_model(teacher):
        raise ValueError(
            "teacher is compressed, and would teach its own errors. Give the dense model: get_comera_model compresses "
            "in place, so load it once more, or pass copy.deepcopy(dense) to get_comera_model."
        )
    owned = {id(parameter) for parameter in teacher.parameters()}
    shared = next((name for name, parameter in model.named_parameters() if id(parameter) in owned), None)
    if shared is not None:
        raise ValueError(
            f"model and teacher share parameters, such as {shared!r}, so the teacher would change with the student. "
            "Load the teacher once more, or pass copy.deepcopy(dense) to get_comera_model."
        )


def _check_sizes(model: Any, teacher: Any, args: HealingArguments, objective: str) -> None:
    """Refuse a student whose outputs cannot be compared with the teacher's."""
    with_hidden = args.hidden_weight > 0
    names = ["vocab_size", "hidden_size"] if objective == "embedding" else ["vocab_size"]
    if with_hidden:
        names = ["vocab_size", "hidden_size", "num_hidden_layers"]
    if objective == "classes":
        names.append("num_labels")
    for name in names:
        ours, wanted = (getattr(one.config.get_text_config(), name, None) for one in (model, teacher))
        if ours != wanted:
            hidden_only = name == "num_hidden_layers" or (name == "hidden_size" and objective != "embedding")
            raise ValueError(
                f"{name} is {ours} in the student and {wanted} in the teacher, but has to be the same"
                + (" for hidden_weight above 0. Use hidden_weight=0." if hidden_only else ". Use the dense model that "
                   "the student was made from.")
            )  # fmt: skip


def _field(outputs: Any, name: str, objective: str) -> Tensor:
    value = getattr(outputs, name, None)
    if isinstance(value, Tensor):
        return value
    raise ValueError(
        f"objective={objective!r} needs {name} in the outputs of the model, but they have "
        f"{', '.join(outputs.keys())}. Bare encoders have last_hidden_state ('embedding'), classifiers and language "
        "models have logits ('classes', 'tokens')."
    )


def _hidden_losses(ours: Any, wanted: Any, mask: Tensor | None, decoder_mask: Tensor | None) -> Tensor:
    """For each sentence, the mean over the stacks of layers: one, or encoder and decoder."""
    masks = {"hidden_states": mask, "encoder_hidden_states": mask, "decoder_hidden_states": decoder_mask}
    losses = []
    for name, mask_of_stack in masks.items():
        found, exact = getattr(ours, name, None), getattr(wanted, name, None)
        if found is not None and exact is not None:
            if found[0].dim() != 3:
                raise ValueError(
                    f"hidden_weight is above 0, but {name} have shape {tuple(found[0].shape)}, which is not "
                    "(sentences, tokens, width). Use hidden_weight=0."
                )
            losses.append(distillation.hidden_difference(found, exact, mask_of_stack))
    if not losses:
        raise ValueError("hidden_weight is above 0, but the model gives no hidden states. Use hidden_weight=0.")
    return torch.stack(losses).mean(0)
