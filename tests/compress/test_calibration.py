"""hf_comera/compress/calibration.py: statistics are those of the real inputs, and leave the model as it was."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_comera import Calibration, ComeraConfig, calibrate, get_comera_model
from hf_comera.compress.calibration import FILE, weight_matrix
from tests.architectures import ARCHITECTURES, VOCABULARY, every_architecture


def batches_of(architecture, number=3):
    torch.manual_seed(0)
    return [architecture.inputs() for _ in range(number)]


def padded_batch():
    """Three rows of 9, 5 and 1 tokens."""
    torch.manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (3, 9))
    mask = (torch.arange(9) < torch.tensor([[9], [5], [1]])).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def inputs_of(model, name, batches):
    """What a layer reads, all places, in float64."""
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    handle.remove()
    return torch.cat([x.reshape(-1, x.shape[-1]) for x in seen]).double()


@every_architecture
def test_moments_are_those_of_the_inputs_and_nothing_else_changes(architecture):
    model, batches = architecture.new_model().train(), batches_of(architecture)
    before = copy.deepcopy(model.state_dict())
    calibration = calibrate(model, batches)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    model.eval()
    linear = {n: m for n, m in model.named_modules() if type(m) in (nn.Linear, Conv1D)}
    own = {n: m for n, m in linear.items() if not any(m.weight is e.weight for e in embeddings(model))}
    assert set(calibration.layers) == set(own)
    for name, layer in own.items():
        exact = inputs_of(model, name, batches)
        found = calibration.inputs[calibration.layers[name]]
        assert found.tokens == len(exact)
        torch.testing.assert_close(found.second_moment, exact.T @ exact / len(exact), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.mean, exact.mean(0), rtol=1e-4, atol=1e-6)
        assert len(calibration.energies[name]) == min(weight_matrix(layer).shape)
    assert all(value >= 0 for value in calibration.sensitivities.values())


def embeddings(model):
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


def test_query_key_and_value_share_their_inputs():
    calibration = calibrate(ARCHITECTURES["bert-mlm"].new_model(), batches_of(ARCHITECTURES["bert-mlm"]))
    attention = "bert.encoder.layer.1.attention.self"
    assert {calibration.layers[f"{attention}.{name}"] for name in ("query", "key", "value")} == {f"{attention}.query"}


def test_padding_is_left_out():
    model, batch = ARCHITECTURES["bert-classifier"].new_model(), padded_batch()
    alone = [
        {key: value[row : row + 1, :length] for key, value in batch.items()} for row, length in enumerate((9, 5, 1))
    ]
    padded, exact = calibrate(model, [batch]), calibrate(model, alone)
    inside = [name for name in exact.inputs if "encoder" in name]
    assert len(inside) == 8
    for name in inside:
        assert padded.inputs[name].tokens == exact.inputs[name].tokens == 15
        torch.testing.assert_close(
            padded.inputs[name].second_moment, exact.inputs[name].second_moment, rtol=1e-4, atol=1e-5
        )
    words = "bert.embeddings.word_embeddings"
    assert torch.equal(padded.token_counts[words], exact.token_counts[words])
    ids = batch["input_ids"][batch["attention_mask"].bool()]
    assert torch.equal(padded.token_counts[words], torch.bincount(ids, minlength=VOCABULARY).double())


def test_each_side_of_a_sequence_to_sequence_model_has_its_own_mask():
    model = ARCHITECTURES["t5"].new_model()
    ids = torch.randint(2, VOCABULARY, (2, 6))
    masks = torch.tensor([[1] * 6, [1] * 4 + [0] * 2]), torch.tensor([[1] * 6, [1] * 1 + [0] * 5])
    batch = {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "attention_mask": masks[0],
        "decoder_attention_mask": masks[1],
    }
    calibration = calibrate(model, [batch])
    tokens = {name: calibration.inputs[leader].tokens for name, leader in calibration.layers.items()}
    assert tokens["encoder.block.0.layer.0.SelfAttention.q"] == 10
    assert tokens["decoder.block.0.layer.0.SelfAttention.q"] == 7
    assert tokens["decoder.block.0.layer.1.EncDecAttention.q"] == 7
    assert tokens["decoder.block.0.layer.1.EncDecAttention.k"] == 10


def test_sensitivities_are_the_rise_of_the_output_error():
    """By hand, for one layer without padding: two factors of a quarter of its numbers."""
    architecture = ARCHITECTURES["llama-untied"]
    model, batches = architecture.new_model().double(), batches_of(architecture, 8)
    calibration = calibrate(model, batches)
    name = "model.layers.0.mlp.down_proj"
    with torch.no_grad():
        exact = torch.cat([model(**batch).logits for batch in batches])
        inputs, weight = inputs_of(model, name, batches), model.get_submodule(name).weight
        _, _, directions = torch.linalg.svd(inputs @ weight.T, full_matrices=False)
        rank = int(0.25 * weight.numel() / sum(weight.shape))
        weight.data = directions[:rank].T @ directions[:rank] @ weight
        found = torch.cat([model(**batch).logits for batch in batches])
    error = calibration.energies[name][rank:].sum().item()
    rise = ((found - exact).square().sum() / exact.square().sum()).item()
    assert calibration.sensitivities[name] == pytest.approx(rise / error, rel=0.02)  # batches count alike


def test_a_saved_calibration_is_the_same(tmp_path):
    calibration = calibrate(ARCHITECTURES["gpt2"].new_model(), batches_of(ARCHITECTURES["gpt2"]))
    path = calibration.save(tmp_path / "new" / "folder")
    assert path.name == FILE
    assert [file.name for file in path.parent.iterdir()] == [FILE]
    found = Calibration.load(path.parent)
    assert (found.layers, found.sensitivities) == (calibration.layers, calibration.sensitivities)
    assert found.model_class == calibration.model_class
    for name, inputs in calibration.inputs.items():
        assert torch.equal(found.inputs[name].second_moment, inputs.second_moment)
        assert torch.equal(found.inputs[name].mean, inputs.mean)
        assert found.inputs[name].tokens == inputs.tokens
    for kind in ("token_counts", "energies"):
        before, after = getattr(calibration, kind), getattr(found, kind)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_no_calibration_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"has no {FILE}. Make one"):
        Calibration.load(tmp_path)
    (tmp_path / FILE).write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="is no calibration, or damaged"):
        Calibration.load(tmp_path)
    path = calibrate(ARCHITECTURES["gpt2"].new_model(), batches_of(ARCHITECTURES["gpt2"])).save(tmp_path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="is no calibration, or damaged"):
        Calibration.load(tmp_path)


class Words:
    """A tokenizer as small as can be."""

    model_max_length = 7

    def __call__(self, texts, **settings):
        assert settings["max_length"] == 7
        ids = [[2 + len(word) for word in text.split()][:7] for text in texts]
        longest = max(map(len, ids))
        return {
            "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in ids]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids]),
        }


def test_texts_are_tokenised():
    model = ARCHITECTURES["bert-classifier"].new_model()
    texts = ["a tale of two words"] * 33 + ["one"]
    calibration = calibrate(model, texts, processing_class=Words())
    assert calibration.token_counts["bert.embeddings.word_embeddings"].sum() == 33 * 5 + 1
    with pytest.raises(ValueError, match="batches holds texts, so processing_class="):
        calibrate(model, texts)


WRONG = {
    "none": ([], "batches is empty"),
    "one": ({"input_ids": torch.ones(1, 3, dtype=torch.long)}, "a list of batches or of texts is needed"),
    "no dictionary": ([torch.ones(1, 3)], "batch 0 is a Tensor, but a dictionary"),
    "another key": ([{"input_ids": torch.ones(1, 3, dtype=torch.long), "text": ["a"]}], "batch 0 has text"),
    "no input": ([{"attention_mask": torch.ones(1, 3)}], "batch 0 lacks input_ids"),
    "not a number": ([{"inputs_embeds": torch.full((1, 3, 48), torch.nan)}], "hold NaN or infinity"),
}


@pytest.mark.parametrize(("batches", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_batches_are_refused_by_name(batches, message):
    model = ARCHITECTURES["bert-classifier"].new_model().train()
    with pytest.raises(ValueError, match=message):
        calibrate(model, batches)
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_wrong_models_are_refused_by_name():
    architecture = ARCHITECTURES["bert-classifier"]
    batches = batches_of(architecture)
    with pytest.raises(ValueError, match="a Transformers model is needed"):
        calibrate(nn.Linear(3, 4), batches)
    with pytest.raises(ValueError, match="on the meta device, without values"):
        calibrate(architecture.new_model().to("meta"), batches)
    compressed = get_comera_model(architecture.new_model(), ComeraConfig(rank=4))
    with pytest.raises(ValueError, match=r"is compressed already\. Calibrate the dense model"):
        calibrate(compressed, batches)
    with pytest.raises(ValueError, match="max_gigabytes=1e-06 do not hold"):
        calibrate(architecture.new_model(), batches, max_gigabytes=1e-6)


def test_a_layer_with_too_few_inputs_is_known_as_such():
    architecture = ARCHITECTURES["bert-classifier"]
    calibration = calibrate(architecture.new_model(), batches_of(architecture, 1))
    name = "bert.encoder.layer.0.attention.self.query"
    assert calibration.of_layer(name, 48) is None  # 18 tokens of 48 numbers
    assert name not in calibration.sensitivities
    with pytest.raises(ValueError, match="inputs of size 48"):
        calibration.of_layer(name, 47)
    with pytest.raises(ValueError, match="no inputs of the layer 'other'"):
        calibration.of_layer("other", 48)
    with pytest.raises(ValueError, match="no counts of the embedding 'other'"):
        calibration.counts_of("other", 241)
    with pytest.raises(ValueError, match="no energies of the layer 'other'"):
        calibration.energies_of("other", 48, 48)


def test_a_table_with_fewer_rows_than_columns_has_as_many_energies_as_rows():
    config = ARCHITECTURES["bert-classifier"].new_config()
    config.vocab_size = 40
    model = ARCHITECTURES["bert-classifier"].auto_class.from_config(config)
    calibration = calibrate(model, [{"input_ids": torch.randint(2, 40, (8, 9))}])
    assert len(calibration.energies_of("bert.embeddings.word_embeddings", 40, 48)) == 40
    model = get_comera_model(model, ComeraConfig(target_ratio=0.7), calibration=calibration)
    assert model.comera_plan().ratio >= 1 / 0.7
