"""hf_comera/modules/latent_attention.py: generation of every kind, with caches of latents, is that without blocks."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_comera.modules import TTLinear
from tests.fused_models import FUSED, VOCABULARY, blocks_that_run, model_of, unfused

GENERATORS = [name for name, row in FUSED.items() if row.is_causal and row.attentions]
ROTARY = ["llama", "llama-biases", "mistral", "qwen2", "qwen3", "gemma", "phi3"]
FEW = ["gpt2", "opt", "llama", "mistral"]
each_of_few = pytest.mark.parametrize("name", FEW)
PROMPT, NEW = 7, 6


def prompt(batch=2):
    ids, mask = torch.randint(3, VOCABULARY, (batch, PROMPT)), torch.ones(batch, PROMPT, dtype=torch.long)
    ids[1:, :3], mask[1:, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model, inputs, **settings):
    torch.manual_seed(3)
    new = {"max_new_tokens": NEW, "min_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **new, **settings)


def assert_generates_the_same(model, inputs, **settings):
    assert blocks_that_run(model)[0] == 2
    found, expected = generated(model, inputs, **settings), generated(unfused(model), inputs, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits)
    assert any(logits.std() > 1e-3 for logits in expected.logits)
    return found


@pytest.mark.parametrize("name", GENERATORS)
def test_greedy_generation(name):
    model = model_of(name).eval()
    cache = assert_generates_the_same(model, prompt(), do_sample=False).past_key_values
    for layer in cache.layers:
        keys, values = layer.keys, layer.values
        assert type(keys) is type(values) is torch.Tensor
        if name not in ROTARY:
            assert keys.shape[1] == values.shape[1] == 1
            assert keys.shape[3] == values.shape[3] == 8
        else:
            assert keys.shape[1] * keys.shape[3] == model.config.num_key_value_heads * model.config.head_dim
            assert values.shape[1] * values.shape[3] == 8


WAYS = {
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 3, "do_sample": False},
    "several": {"num_return_sequences": 3, "do_sample": True},
    "several of the beams": {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
    "static": {"cache_implementation": "static", "do_sample": False},
    "static beams": {"cache_implementation": "static", "num_beams": 2, "do_sample": False},
    "a prompt in pieces": {"prefill_chunk_size": 4, "do_sample": False},
    "without a cache": {"use_cache": False, "do_sample": False},
}
OF_ONE_TEXT = {"by the prompt": {"prompt_lookup_num_tokens": 2}, "assisted": {"assistant_model": True}}


@pytest.mark.parametrize("way", WAYS)
@each_of_few
def test_ways_of_generation(name, way):
    assert_generates_the_same(model_of(name).eval(), prompt(), **WAYS[way])


@pytest.mark.parametrize("way", OF_ONE_TEXT)
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_generation_that_crops_its_cache(name, way):
    model, settings = model_of(name).eval(), dict(OF_ONE_TEXT[way])
    if "assistant_model" in settings:
        settings["assistant_model"] = model_of("gpt2").eval()
    inputs = {key: tensor[:1] for key, tensor in prompt().items()}
    assert_generates_the_same(model, inputs, do_sample=False, **settings)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_scores_of_long_and_of_single_steps_agree(name, implementation):
    """Tokens that follow a prompt, several at once and one by one, give what the whole text does."""
    model, ids = model_of(name).eval(), torch.randint(3, VOCABULARY, (2, 13))
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        expected, cache, found = model(ids).logits, DynamicCache(config=model.config), []
        for piece in ids.split([5, 1, 3, 1, 1, 2], dim=1):
            found.append(model(piece, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@each_of_few
def test_generation_in_less_precision(name, dtype):
    inputs, exact = prompt(), model_of(name).eval()
    model = model_of(name, dtype=dtype).eval()
    ids = generated(exact, inputs, do_sample=False).sequences
    with torch.no_grad():
        logits = [forced(each, ids, inputs["attention_mask"]).double() for each in (model, unfused(model), exact)]
    errors = [(each - logits[2]).norm() for each in logits[:2]]
    assert errors[0] <= 2 * errors[1]


def forced(model, ids, mask):
    """Logits of these tokens, one by one behind the prompt."""
    cache, found = DynamicCache(config=model.config), []
    for start, stop in ((0, PROMPT), *((place, place + 1) for place in range(PROMPT, ids.shape[1]))):
        seen = torch.cat([mask, mask.new_ones(len(ids), stop - PROMPT)], 1)
        found.append(model(ids[:, start:stop], attention_mask=seen, past_key_values=cache).logits)
    return torch.cat(found, 1)


CHANGES = {
    "cropped": lambda cache: cache.crop(-4),
    "selected": lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
    "repeated": lambda cache: cache.batch_repeat_interleave(2),
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "copied": copy.deepcopy,
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_caches_are_changed_as_they_are_without_blocks(name, change):
    model = model_of(name).eval()
    start, end, found = torch.randint(3, VOCABULARY, (2, 9)), torch.randint(3, VOCABULARY, (2, 2)), []
    for each in (model, unfused(model)):
        cache = each(start, past_key_values=DynamicCache(config=model.config)).past_key_values
        cache = CHANGES[change](cache) or cache
        rows = cache.layers[0].keys.shape[0]
        found.append(each(end.repeat(rows // 2, 1), past_key_values=cache).logits)
    torch.testing.assert_close(*found)


@torch.no_grad()
@each_of_few
def test_a_static_cache_that_is_used_again(name):
    model, ids = model_of(name).eval(), torch.randint(3, VOCABULARY, (2, 9))
    cache = StaticCache(config=model.config, max_cache_len=16)
    first = model(ids, past_key_values=cache).logits
    cache.reset()
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, first)
    torch.testing.assert_close(first, unfused(model)(ids).logits)


@each_of_few
@pytest.mark.parametrize("tokens", [1, 9])
def test_what_follows_a_prompt_without_gradients_can_train(name, tokens):
    model = model_of(name)
    start, end, found = torch.randint(3, VOCABULARY, (2, 9)), torch.randint(3, VOCABULARY, (2, tokens)), []
    for each in (model, unfused(model)):
        with torch.no_grad():
            cache = each(start, past_key_values=DynamicCache(config=model.config)).past_key_values
        logits = each(end, past_key_values=cache).logits
        (logits * torch.cos(torch.arange(logits.numel(), dtype=logits.dtype)).view_as(logits)).sum().backward()
        found.append({key: parameter.grad for key, parameter in each.named_parameters()})
    torch.testing.assert_close(*found)


@each_of_few
def test_gradients_flow_through_a_cache(name):
    model = model_of(name)
    start, end, found = torch.randint(3, VOCABULARY, (2, 5)), torch.randint(3, VOCABULARY, (2, 3)), []
    for each in (model, unfused(model)):
        first = each(start, past_key_values=DynamicCache(config=model.config))
        logits = torch.cat([first.logits, each(end, past_key_values=first.past_key_values).logits], 1)
        (logits * torch.cos(torch.arange(logits.numel(), dtype=logits.dtype)).view_as(logits)).sum().backward()
        found.append({key: parameter.grad for key, parameter in each.named_parameters()})
    torch.testing.assert_close(*found)


@torch.no_grad()
@pytest.mark.parametrize("fused_first", [True, False])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "llama-biases", "phi3", "bert-decoder"])
def test_hooks_that_come_and_go_between_tokens(name, kind, fused_first):
    model, ids = model_of(name).eval(), torch.randint(3, VOCABULARY, (2, 12))
    expected = unfused(model)(ids).logits
    cache = kind(config=model.config) if kind is DynamicCache else kind(config=model.config, max_cache_len=16)
    layer = next(module for key, module in model.named_modules() if isinstance(module, TTLinear) and "att" in key)
    hooks, found = [], []
    for place, piece in enumerate(ids.split(3, dim=1)):
        if place % 2 == fused_first:
            hooks.append(layer.register_forward_hook(lambda *args: None))
        found.append(model(piece, past_key_values=cache).logits)
        while hooks:
            hooks.pop().remove()
    torch.testing.assert_close(torch.cat(found, 1), expected)
    first = cache.layers[0].values
    assert first.shape[1] * first.shape[3] == (16 if name in ROTARY else 32)


@torch.no_grad()
def test_latents_of_a_layer_that_is_gone_are_refused():
    model, ids = model_of("gpt2").eval(), torch.randint(3, VOCABULARY, (2, 5))
    cache = model(ids, past_key_values=DynamicCache(config=model.config)).past_key_values
    model.transformer.h[0].attn.c_attn = torch.nn.Linear(32, 96, dtype=torch.float64)
    with pytest.raises(ValueError, match="past_key_values holds latents of c_attn, which has become a Linear"):
        model(ids, past_key_values=cache)


@torch.no_grad()
@each_of_few
def test_keys_and_values_of_somebody_else_go_to_the_own_forward(name):
    """As those of prefix tuning, or of an export that makes a static cache before the first call."""
    model, ids = model_of(name).eval(), torch.randint(3, VOCABULARY, (2, 5))
    found = []
    for each in (model, unfused(model)):
        cache, heads = DynamicCache(config=model.config), 2 if name in ROTARY else 4
        for index in range(2):
            prefix = torch.cos(torch.arange(2 * heads * 3 * 8, dtype=torch.float64)).view(2, heads, 3, 8)
            cache.update(prefix, -prefix, index)
        found.append(each(ids, past_key_values=cache).logits)
    torch.testing.assert_close(*found)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_single_head_with_a_latent_of_its_size_runs_its_own_forward(name):
    """Where shapes would not tell the caches of both forwards from each other."""
    one_head = {"gpt2": {"n_head": 1, "n_embd": 32}, "llama": {"num_attention_heads": 2, "num_key_value_heads": 1}}
    sizes = {"gpt2": {"rank": 31}, "llama": {"rank": 8}}
    model = model_of(name, **sizes[name], **one_head[name]).eval()
    assert blocks_that_run(model)[0] == 0


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_copies_of_a_model_generate_the_same(name):
    model, inputs = model_of(name).eval(), prompt()
    assert torch.equal(
        generated(copy.deepcopy(model), inputs, do_sample=False).sequences,
        generated(model, inputs, do_sample=False).sequences,
    )
