"""A sentence encoder as small as can be, with a tokenizer of forty words: w0 to w39."""

from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast


def new_encoder(folder, **sizes):
    """Its files, in a folder below ``folder``."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, **sizes}
    BertModel(BertConfig(**sizes, vocab_size=40), add_pooling_layer=False).save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(40)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1").save_pretrained(folder / "model")
    return folder / "model"
