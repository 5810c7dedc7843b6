"""Caches of codes: generation of every kind gives what it gives with tensors; a token takes as much as its code."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.compress.siblings import CACHED
from hf_comera.modules import TTLinear, joined, unwritten_heads
from hf_comera.modules.unwritten_heads import UnwrittenHeads

SIZES = {
    "gpt2": {"n_positions": 66, "n_embd": 48, "n_layer": 2, "n_head": 4},
    "opt": {
        "max_position_embeddings": 66,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 96,
        "word_embed_proj_dim": 48,
    },
}
PROMPT, NEW = 7, 6
CODE = 8
"""Rank 7 and the bias."""


@pytest.fixture(params=SIZES)
def model(request, monkeypatch):
    monkeypatch.setattr(joined, "WORTH_A_CACHE", 1)
    monkeypatch.setattr(unwritten_heads, "WORTH_CODES", 6 * 48 + 1)  # prompts, but no single token
    torch.manual_seed(0)
    tokens = {"vocab_size": 241, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0}
    config = CONFIG_MAPPING[request.param](**SIZES[request.param], **tokens)
    model = get_comera_model(AutoModelForCausalLM, ComeraConfig(rank=7), config=config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


@pytest.fixture
def prompt():
    ids, mask = torch.randint(2, 241, (2, PROMPT)), torch.ones(2, PROMPT, dtype=torch.long)
    ids[1, :3], mask[1, :3] = 1, 0
    return {"input_ids": ids, "attention_mask": mask}


def groups(model):
    return {module.joined for module in model.modules() if isinstance(module, TTLinear) and module.joined}


def do_without_codes(model):
    for group in groups(model):
        group.attention = None


def layers(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


def in_codes(cache):
    return all(isinstance(part, UnwrittenHeads) and part._real is None for pair in layers(cache) for part in pair)


def numbers_per_token(cache, batch):
    """Over all layers, counted by memory."""
    storages = {part._codes.code.untyped_storage() for pair in layers(cache) for part in pair}
    tokens = cache.get_seq_length()
    return sum(storage.nbytes() for storage in storages) / 8 / (batch * tokens)


def generated(model, prompt, **settings):
    torch.manual_seed(3)
    return model.generate(
        **prompt, max_new_tokens=NEW, min_new_tokens=NEW, return_dict_in_generate=True, output_logits=True, **settings
    )


def test_every_class_has_a_model_here(model):
    assert any(type(module).__name__ in CACHED for module in model.modules())
    assert len(CACHED) == len(SIZES)


WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 3, "do_sample": False},
    "several": {"num_return_sequences": 3, "do_sample": True},
    "by the prompt": {"prompt_lookup_num_tokens": 2, "do_sample": False},
    "a prompt in pieces": {"prefill_chunk_size": 4, "do_sample": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_generation_is_that_with_tensors(model, prompt, way):
    if way == "by the prompt":
        prompt = {name: value[:1] for name, value in prompt.items()}
    found = generated(model, prompt, **WAYS[way])
    assert in_codes(found.past_key_values)
    do_without_codes(model)
    expected = generated(model, prompt, **WAYS[way])
    assert not in_codes(expected.past_key_values)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits)


@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_a_token_takes_as_much_as_its_code(model, prompt, way):
    cache = generated(model, prompt, **WAYS[way]).past_key_values
    batch, codes = layers(cache)[0][0].shape[0], {"gpt2": 1, "opt": 2}[model.config.model_type]
    assert numbers_per_token(cache, batch) == 2 * codes * CODE


@torch.no_grad()
def continued(model, ids, cache):
    return model(ids, past_key_values=cache).logits


@torch.no_grad()
def test_a_prompt_serves_several_texts(model):
    start, ends = torch.randint(2, 241, (1, 9)), torch.randint(2, 241, (2, 1, 5))
    cache = model(start, past_key_values=DynamicCache(config=model.config)).past_key_values
    for end in ends:
        mine = copy.deepcopy(cache)
        found = continued(model, end, mine)
        assert in_codes(mine)
        assert mine.get_seq_length() == 14
        torch.testing.assert_close(found, model(torch.cat([start, end], 1)).logits[:, 9:])
    assert cache.get_seq_length() == 9


CHANGES = {
    "cropped": lambda cache: cache.crop(-4),
    "selected": lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
    "repeated": lambda cache: cache.batch_repeat_interleave(2),
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_caches_are_changed_as_tensors_are(model, change):
    start, end = torch.randint(2, 241, (2, 9)), torch.randint(2, 241, (2, 2))
    found = []
    for _ in range(2):
        cache = model(start, past_key_values=DynamicCache(config=model.config)).past_key_values
        CHANGES[change](cache)
        rows = layers(cache)[0][0].shape[0]
        found.append(continued(model, end.repeat(rows // 2, 1), cache))
        if len(found) == 1:
            assert numbers_per_token(cache, rows) == 2 * {"gpt2": 1, "opt": 2}[model.config.model_type] * CODE
        do_without_codes(model)
        assert in_codes(cache) == (len(found) == 1)
    torch.testing.assert_close(*found)


@torch.no_grad()
def test_codes_of_other_weights_are_written_out(model):
    start, end = torch.randint(2, 241, (1, 9)), torch.randint(2, 241, (1, 2))
    found = []
    for _ in range(2):
        cache = model(start, past_key_values=DynamicCache(config=model.config)).past_key_values
        states = {name: value.clone() for name, value in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.mul_(1.1)
        found.append(continued(model, end, cache))
        model.load_state_dict(states)
        do_without_codes(model)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("tokens", [1, 9])
def test_what_follows_a_prompt_without_gradients_can_train(model, tokens):
    start, end = torch.randint(2, 241, (2, 9)), torch.randint(2, 241, (2, tokens))
    found = []
    for _ in range(2):
        model.zero_grad()
        with torch.no_grad():
            cache = model(start, past_key_values=DynamicCache(config=model.config)).past_key_values
        logits = model(end, past_key_values=cache).logits
        (logits * torch.cos(torch.arange(logits.numel(), dtype=logits.dtype)).view_as(logits)).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
        do_without_codes(model)
    torch.testing.assert_close(*found)


@torch.no_grad()
def test_tokens_come_as_tensors_once_no_cache_waits(model):
    layer = next(
        module for module in model.modules() if isinstance(module, TTLinear) and module.joined in caching(model)
    )
    cache = model(torch.randint(2, 241, (1, 9)), past_key_values=DynamicCache(config=model.config)).past_key_values
    assert layer.code_heads(1) is not None
    del cache
    assert layer.code_heads(1) is None


def caching(model):
    return [group for group in groups(model) if group.has_cache]


def test_short_prompts_wait_as_tensors(model, prompt, monkeypatch):
    monkeypatch.setattr(joined, "WORTH_A_CACHE", 2 * PROMPT * 48 + 1)
    assert not in_codes(generated(model, prompt).past_key_values)


def test_training_keeps_no_cache_of_codes(model, prompt):
    model.train()(**prompt, labels=prompt["input_ids"]).loss.backward()
    assert not any(group.is_cached for group in groups(model))


def test_copies_of_a_model_cache_codes_too(model, prompt):
    assert in_codes(generated(copy.deepcopy(model), prompt).past_key_values)


@torch.no_grad()
def test_a_second_cache_that_goes_leaves_the_first(model):
    start = torch.randint(2, 241, (1, 9))
    cache = model(start, past_key_values=DynamicCache(config=model.config)).past_key_values
    model(start, past_key_values=DynamicCache(config=model.config))
    continued(model, start[:, :1], cache)
    assert in_codes(cache)
