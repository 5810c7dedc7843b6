"""Time a compressed model that only answers: encoder batches and generation, against the dense model it merges to.

    python -m benchmarks.speed.inference
    python -m benchmarks.speed.inference --dtype bf16

`--help` says what is compared and how to read the figures.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, PreTrainedModel

from benchmarks.harness.process import in_own_process
from benchmarks.harness.timing import Comparison, benchmark_parser, check_agreement, report
from hf_comera import ComeraConfig, get_comera_model, size_report
from hf_comera.modules.halves_cache import drop_cached_halves
from loop.measure import DENSE, TENSOR_TRAIN, time_interleaved
from loop.memory import training_peak
from mnli.model import paper_shapes, six_encoders

DESCRIPTION = """\
Forward passes without gradients of the six-encoder BERT of the CoMERA paper, and
greedy generation with a GPT-2 of six layers (768 wide, rank 30, 16 or 512 tokens of
prompt, 32 new ones), in tensor-train form and merged to dense. What is made of the
cores (halves, half tables of the embedding) is kept from call to call; "anew" is
the same model when it is dropped before every forward pass, of which generation
has one for each new token. Logits must agree before anything is timed. The peak
is that of weights and a call, in which halves are made anew.
"""
ANEW = "anew"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
ENCODER, DECODER = "bert-6x768", "gpt2-6x768"
NEW_TOKENS = 32
BATCHES = {ENCODER: ((1, 16), (1, 128), (8, 128)), DECODER: ((1, 16), (8, 16), (8, 512))}
VOCABULARY = 30522


def main() -> None:
    """Measure all cases, print the table, write the rows."""
    parser = benchmark_parser(DESCRIPTION, rounds=15)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of parameters and activations; default fp32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    report("Inference", list(measured_cases(args)), save_as=None if args.no_save else "bench_inference")


def measured_cases(args: argparse.Namespace) -> Iterator[Comparison]:
    """All batches of both models."""
    for name, batches in BATCHES.items():
        models = build_twins(name, DTYPES[args.dtype])
        for batch in batches:
            yield compare(name, batch, models, args)


def build_twins(name: str, dtype: torch.dtype) -> dict[str, PreTrainedModel]:
    """The tensor-train model, and what it merges to."""
    if name == ENCODER:
        model = get_comera_model(AutoModelForSequenceClassification, paper_shapes(), config=six_encoders())
    else:
        config = GPT2Config(n_layer=6, bos_token_id=0, eos_token_id=0)
        model = get_comera_model(AutoModelForCausalLM, ComeraConfig(rank=30), config=config)
    model = model.to(dtype).eval()
    return {DENSE: copy.deepcopy(model).merge_and_unload().eval(), TENSOR_TRAIN: model}


def compare(
    name: str, batch: tuple[int, int], models: dict[str, PreTrainedModel], args: argparse.Namespace
) -> Comparison:
    """Time one case."""
    ids = draw_ids(batch)
    check_agreement("logits", *(logits(models[form], ids) for form in (TENSOR_TRAIN, DENSE)), TOLERANCE[args.dtype])
    runs: dict[str, Callable[[], object]] = {form: partial(RUNS[name], model, ids) for form, model in models.items()}
    runs[ANEW] = partial(anew, models[TENSOR_TRAIN], runs[TENSOR_TRAIN])
    tokens = "x".join(map(str, batch)) + (f"+{NEW_TOKENS}" if name == DECODER else "")
    timings = time_interleaved(runs, args.rounds, label=f"{name} {tokens}")
    extra: dict[str, str | int | float] = {
        "halves_anew_ms": round(timings.median(ANEW) * 1e3, 3),
        "kept_over_anew": round(timings.ratio(TENSOR_TRAIN, ANEW), 2),
    }
    for form, model in models.items():
        extra[f"{form.replace(' ', '_')}_bytes"] = size_report(model).bytes
    return Comparison(
        case={"model": name, "tokens": tokens, "dtype": args.dtype},
        timings=timings,
        saved_bytes=None,
        promised=None,
        extra=extra,
        peak_bytes={form: in_own_process(args.threads, peak, name, batch, args.dtype, form) for form in models},
    )


def draw_ids(batch: tuple[int, int]) -> Tensor:
    """Tokens that both models know; 0 ends a text."""
    return torch.randint(1, VOCABULARY, batch)


def peak(name: str, batch: tuple[int, int], dtype: str, form: str) -> int | None:
    """The most memory that one form takes, for a process of its own."""
    model = build_twins(name, DTYPES[dtype])[form]
    return training_peak(partial(RUNS[name], model, draw_ids(batch)), model)


def anew(model: PreTrainedModel, run: Callable[[], object]) -> None:
    """``run`` as if the cores changed before every forward pass."""
    hook = model.register_forward_pre_hook(lambda *_: drop_cached_halves())
    try:
        run()
    finally:
        hook.remove()


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """One forward pass."""
    return model(input_ids=ids).logits


def generate(model: PreTrainedModel, prompt: Tensor) -> Tensor:
    """Greedy, exactly as many tokens as asked for."""
    settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)


RUNS = {ENCODER: logits, DECODER: generate}


if __name__ == "__main__":
    main()
