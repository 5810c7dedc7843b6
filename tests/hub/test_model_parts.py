"""Parts of a composite model save and load alone, and two compressed models make a composite one."""

import copy
import json

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    CLIPConfig,
    CLIPModel,
    CLIPTextModel,
    CLIPVisionModel,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    T5ForConditionalGeneration,
)

from hf_comera import ComeraConfig, get_comera_model, is_comera_model
from tests.architectures import ARCHITECTURES, SIZES, WORDS

BERT = {**SIZES, **WORDS}
IDS = torch.arange(2, 14).reshape(2, 6)


def clip():
    """CLIP's two towers, each with a config."""
    text = {**BERT, "max_position_embeddings": 16, "eos_token_id": 2}
    config = CLIPConfig(text_config=text, vision_config={**SIZES, "image_size": 32, "patch_size": 8})
    return get_comera_model(CLIPModel, ComeraConfig(rank=4), config=config).eval()


def encoder_decoder():
    """Two BERTs, each with a config."""
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**BERT), BertConfig(**BERT))
    return get_comera_model(EncoderDecoderModel, ComeraConfig(rank=4), config=config).eval()


def same_weights(first, second):
    """Equal names and entries."""
    expected = second.state_dict()
    return first.state_dict().keys() == expected.keys() and all(
        torch.equal(value, expected[name]) for name, value in first.state_dict().items()
    )


PARTS = [
    (clip, "text_model", CLIPTextModel),
    (clip, "vision_model", CLIPVisionModel),
    (encoder_decoder, "encoder", BertModel),
    (encoder_decoder, "decoder", BertLMHeadModel),
]
every_part = pytest.mark.parametrize(("build", "name", "part_class"), PARTS, ids=[part[1] for part in PARTS])


@every_part
def test_a_part_comes_back_from_its_own_checkpoint(build, name, part_class, tmp_path):
    part = build().get_submodule(name)
    part.save_pretrained(tmp_path)
    loaded, found = part_class.from_pretrained(tmp_path, output_loading_info=True)
    assert is_comera_model(loaded)
    assert not any(found.values())
    assert same_weights(loaded, part)


@every_part
def test_the_whole_comes_back_with_parts_that_save(build, name, part_class, tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    loaded = type(model)._dense_class.from_pretrained(tmp_path)
    assert same_weights(loaded, model)
    loaded.get_submodule(name).save_pretrained(tmp_path / "part")
    assert same_weights(part_class.from_pretrained(tmp_path / "part"), model.get_submodule(name))


def test_what_only_the_constructor_sets_is_set():
    model = clip()
    assert model.logit_scale.item() == pytest.approx(model.config.logit_scale_init_value)


@pytest.mark.parametrize("part", [CLIPTextModel, CLIPVisionModel])
def test_a_tower_is_read_from_the_checkpoint_of_the_whole(part, tmp_path):
    model = clip()
    model.save_pretrained(tmp_path)
    name = "text_model" if part is CLIPTextModel else "vision_model"
    assert same_weights(part.from_pretrained(tmp_path), model.get_submodule(name))


@pytest.mark.parametrize("build", [clip, encoder_decoder])
def test_merging_the_whole_leaves_ordinary_parts(build, tmp_path):
    model = copy.deepcopy(build()).merge_and_unload()
    assert not any(map(is_comera_model, model.modules()))
    model.save_pretrained(tmp_path)
    assert "comera" not in (tmp_path / "config.json").read_text()
    assert same_weights(type(model).from_pretrained(tmp_path), model)


def test_checkpoints_of_a_part_know_its_ranks(tmp_path):
    model = encoder_decoder()
    model.decoder.save_pretrained(tmp_path)
    recorded = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["layers"]
    layer = model.decoder.bert.encoder.layer[0].attention.self.query
    assert recorded["bert.encoder.layer.0.attention.self.query"]["ranks"] == list(layer.ranks)


def test_two_compressed_models_make_one(tmp_path):
    get_comera_model(BertModel, ComeraConfig(rank=4), config=BertConfig(**BERT)).save_pretrained(tmp_path / "one")
    one = str(tmp_path / "one")
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(one, one).eval()
    model.save_pretrained(tmp_path / "both")
    loaded, found = EncoderDecoderModel.from_pretrained(tmp_path / "both", output_loading_info=True)
    assert not any(found.values())
    assert is_comera_model(loaded)
    assert same_weights(loaded, model)
    expected = model(input_ids=IDS, decoder_input_ids=IDS).logits
    torch.testing.assert_close(loaded.eval()(input_ids=IDS, decoder_input_ids=IDS).logits, expected)


def test_a_part_with_a_rank_activation_is_refused(tmp_path):
    get_comera_model(BertModel, ComeraConfig(rank=4), config=BertConfig(**BERT)).save_pretrained(tmp_path / "one")
    one = str(tmp_path / "one")
    EncoderDecoderModel.from_encoder_decoder_pretrained(one, one).save_pretrained(tmp_path)
    path, query = tmp_path / "config.json", "encoder.layer.0.attention.self.query"
    config = json.loads(path.read_text())
    config["encoder"]["quantization_config"]["layers"][query]["rank_activation"] = "silu"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"layers\['encoder\.{query}'\]: rank_activation='silu' was removed"):
        EncoderDecoderModel.from_pretrained(tmp_path)


def test_a_part_that_computes_with_cores_of_the_whole_is_not_saved(tmp_path):
    architecture = ARCHITECTURES["t5"]
    model = get_comera_model(T5ForConditionalGeneration, ComeraConfig(rank=4), config=architecture.new_config())
    with pytest.raises(
        ValueError, match=r"'embed_tokens' computes with the cores .* not in this T5Stack.* whole model"
    ):
        model.encoder.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
