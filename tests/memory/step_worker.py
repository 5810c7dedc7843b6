"""Print the bytes that training steps of a model take at most, measured and estimated.

Use: ``step_worker.py case policy``. What the process itself takes is seen in a first, tiny step.
"""

import sys

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_comera import ComeraConfig, estimate_memory, get_comera_model, set_activation_policy
from hf_comera.memory.estimate import example_batch

SMALL = BertConfig(
    hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048, vocab_size=8000
)
LLAMA = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16)
CASES = {
    "bert-small": (lambda: BertForSequenceClassification(SMALL), 32, 64),
    "bert": (lambda: BertForSequenceClassification(BertConfig()), 8, 128),
    "bert-tt": (
        lambda: get_comera_model(BertForSequenceClassification, ComeraConfig(rank=30), config=BertConfig()),
        32,
        128,
    ),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config()), 8, 128),
    "llama": (lambda: LlamaForCausalLM(LLAMA), 2, 512),
    "t5": (lambda: T5ForConditionalGeneration(T5Config(decoder_start_token_id=0)), 8, 128),
}


def resident(line):
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(text.split()[1]) * 1024 for text in status if text.startswith(line))


def main(case, policy):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, batch_size, seq_len = CASES[case]
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    settings = {"batch_size": batch_size, "seq_len": seq_len, "optimizer": optimizer, "policies": [policy]}
    estimate = estimate_memory(model, **settings)
    set_activation_policy(model, policy)

    def step(**batch):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(**example_batch(model, 1, 8))
    there = estimate.weights + estimate.optimizer
    batch, before = example_batch(model, batch_size, seq_len), resident("VmRSS")
    for _ in range(2):
        with open("/proc/self/clear_refs", "w", encoding="ascii") as refs:
            refs.write("5")
        step(**batch)
    print(resident("VmHWM") - before + there, estimate.policies.popitem()[1].peak)


if __name__ == "__main__":
    main(*sys.argv[1:])
