"""Time a compressed model that only answers: encoder batches and generation, against the dense model it merges to.

    python scripts/bench_inference.py
    python scripts/bench_inference.py --dtype bf16

`--help` says what is compared and how to read the figures.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, PreTrainedModel

from hf_comera import ComeraConfig, get_comera_model, size_report
from hf_comera.modules import TTLinear
from interleaved_timing import (
    DENSE,
    TENSOR_TRAIN,
    Comparison,
    benchmark_parser,
    check_agreement,
    report,
    time_interleaved,
)
from six_encoders import paper_shapes, six_encoders

DESCRIPTION = """\
Forward passes without gradients of the six-encoder BERT of the CoMERA paper, and
greedy generation with a GPT-2 of six layers (768 wide, rank 30, 16 tokens of
prompt, 32 new ones), in tensor-train form and merged to dense. The halves of the
tensor trains are kept from call to call; "anew" is the same model when they are
dropped before every call. Outputs must agree before anything is timed.
"""
ANEW = "anew"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
ENCODER_BATCHES = ((1, 16), (1, 128), (8, 128))
GENERATION_BATCHES = (1, 8)
PROMPT, NEW_TOKENS = 16, 32


def main() -> None:
    """Measure all cases, print the table, write the rows."""
    parser = benchmark_parser(DESCRIPTION, rounds=15)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of parameters and activations; default fp32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    comparisons = [*encoder_cases(args.dtype, args.rounds), *generation_cases(args.dtype, args.rounds)]
    report("Inference", comparisons, save_as=None if args.no_save else "bench_inference")


def encoder_cases(dtype: str, rounds: int) -> Iterator[Comparison]:
    """Forward passes of the six encoders."""
    models = twins(
        get_comera_model(AutoModelForSequenceClassification, paper_shapes(), config=six_encoders()).to(DTYPES[dtype])
    )
    for batch, length in ENCODER_BATCHES:
        ids = torch.randint(30522, (batch, length))
        runs: dict[str, Callable[[], Tensor]] = {form: partial(logits, model, ids) for form, model in models.items()}
        yield compare("bert-6x768", f"{batch}x{length}", dtype, models, runs, rounds)


def generation_cases(dtype: str, rounds: int) -> Iterator[Comparison]:
    """Greedy generation with a key-value cache."""
    config = GPT2Config(n_layer=6, bos_token_id=0, eos_token_id=0)
    models = twins(get_comera_model(AutoModelForCausalLM, ComeraConfig(rank=30), config=config).to(DTYPES[dtype]))
    for batch in GENERATION_BATCHES:
        prompt = torch.randint(1, config.vocab_size, (batch, PROMPT))
        check_agreement("logits", *(logits(models[form], prompt) for form in (TENSOR_TRAIN, DENSE)), TOLERANCE[dtype])
        runs: dict[str, Callable[[], Tensor]] = {
            form: partial(generate, model, prompt) for form, model in models.items()
        }
        yield compare("gpt2-6x768", f"{batch}x{PROMPT}+{NEW_TOKENS}", dtype, models, runs, rounds, exact=False)


def twins(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """The model, and what it merges to."""
    return {DENSE: copy.deepcopy(model).merge_and_unload().eval(), TENSOR_TRAIN: model.eval()}


def compare(
    name: str,
    tokens: str,
    dtype: str,
    models: dict[str, PreTrainedModel],
    runs: dict[str, Callable[[], Tensor]],
    rounds: int,
    *,
    exact: bool = True,
) -> Comparison:
    """Time one case."""
    if exact:
        check_agreement("logits", runs[TENSOR_TRAIN](), runs[DENSE](), TOLERANCE[dtype])
    runs[ANEW] = partial(without_kept_halves, models[TENSOR_TRAIN], runs[TENSOR_TRAIN])
    timings = time_interleaved(runs, rounds, label=f"{name} {tokens}")
    extra: dict[str, str | int | float] = {
        "halves_anew_ms": round(timings.median(ANEW) * 1e3, 3),
        "kept_over_anew": round(timings.ratio(TENSOR_TRAIN, ANEW), 2),
    }
    for form, model in models.items():
        extra[f"{form.replace(' ', '_')}_bytes"] = size_report(model).bytes
    case: dict[str, str | int | float] = {"model": name, "tokens": tokens, "dtype": dtype}
    return Comparison(case=case, timings=timings, saved_bytes=None, promised=None, extra=extra)


def without_kept_halves(model: PreTrainedModel, run: Callable[[], Tensor]) -> None:
    """``run`` as if the cores had changed since the last call."""
    for module in model.modules():
        if isinstance(module, TTLinear):
            module.halves_bank.drop(module)
    run()


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """One forward pass."""
    return model(input_ids=ids).logits


def generate(model: PreTrainedModel, prompt: Tensor) -> Tensor:
    """Greedy, exactly as many tokens as asked for."""
    settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)


if __name__ == "__main__":
    main()
