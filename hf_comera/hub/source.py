"""Where a model comes from: a folder, a ``config.json`` or a name on the Hub; its class, its shapes, its weights."""

import copy
import difflib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_comera.compress import ComeraConfig, plan
from hf_comera.compress.surgery import replace_layers
from hf_comera.hub.build import get_comera_model
from hf_comera.hub.checkpoint import atomic_save
from hf_comera.hub.model import adopt_parts, attach

__all__ = ["TOKENIZER_FILES", "ModelSource", "find_model"]

TOKENIZER_FILES = (
    *("tokenizer*.json", "vocab*", "merges.txt", "*.model", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "*processor_config.json", "*.tiktoken"),
)
"""What stands beside the weights and is no part of the model: patterns of names."""

GUESSES = (
    ("AutoModelForMaskedLM", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING),
    ("AutoModelForCausalLM", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING),
    ("AutoModelForSeq2SeqLM", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
    ("AutoModelForImageClassification", modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING),
)
"""Classes for a config that names none, and the configs that each is for; the first that fits."""

EXAMPLES = "Give a folder with a config.json, the path of one, or a name on the Hub such as 'FacebookAI/roberta-base'."


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that was named: its config is read, its weights are not."""

    given: str
    """As the user wrote it."""
    folder: Path | None
    """Where its files are; None for a name on the Hub."""
    config: PreTrainedConfig
    model_class: Any
    """A class of Transformers, concrete or automatic."""

    @property
    def settings(self) -> ComeraConfig | None:
        """What a compressed checkpoint records; None for a dense one.

        Raises:
            ValueError: If the record is damaged, or the weights are quantized by another library.
        """
        recorded = getattr(self.config, "quantization_config", None)
        if recorded is None or isinstance(recorded, ComeraConfig):
            return recorded
        if recorded.get("quant_method") != "comera":
            raise ValueError(
                f"{self.given} is quantized by {recorded.get('quant_method')!r}, and only dense weights can become "
                "tensor trains. Give the checkpoint that it was made from."
            )
        return ComeraConfig.from_dict(recorded)

    def dense_skeleton(self) -> PreTrainedModel:
        """The dense model on the meta device: names and shapes, no weights."""
        config = copy.deepcopy(self.config)
        vars(config).pop("quantization_config", None)
        build = getattr(self.model_class, "from_config", None) or self.model_class._from_config
        with torch.device("meta"):
            return build(config)

    def compressed_skeleton(self, settings: ComeraConfig | None = None) -> PreTrainedModel:
        """The compressed model on the meta device.

        Args:
            settings: What to compress of a dense model. None: as the checkpoint records it, true ranks included.

        Raises:
            ValueError: If ``settings`` do not fit, are missing for a dense model, or given for a compressed one.
        """
        recorded = self.settings
        if (recorded is None) == (settings is None):
            raise ValueError(
                f"{self.given} is dense, so it needs settings, for example ComeraConfig(rank=30)."
                if recorded is None
                else f"{self.given} is compressed, with the layers and ranks that its config.json records. Leave the "
                "settings out, or give a dense model."
            )
        if settings is not None:
            with torch.device("meta"):
                return get_comera_model(self.model_class, settings, config=copy.deepcopy(self.config))
        assert recorded is not None
        model = self.dense_skeleton()
        adopt_parts(model, recorded)
        replace_layers(model, plan(model, recorded), device="meta")
        model.tie_weights()
        return attach(model, recorded)

    def load(self, **options: Any) -> PreTrainedModel:
        """The model with its weights.

        Args:
            **options: For ``from_pretrained``, such as ``dtype`` or ``quantization_config``.

        Raises:
            ValueError: If a ``config.json`` was given, which has none.
        """
        if self.folder is not None and self.folder.is_file():
            raise ValueError(
                f"{self.given} is a config, and weights are needed. Give the folder of a checkpoint, for example "
                f"{str(self.folder.parent)!r}."
            )
        return self.model_class.from_pretrained(self.folder or self.given, **options).eval()

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; one without a token for padding pads with that of the end.

        Raises:
            ValueError: If there is none, or it has neither token.
        """
        needed = "Put the files of its tokenizer, such as tokenizer.json, into its folder."
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.folder or self.given)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{self.given} has no tokenizer that can be loaded: {error} {needed}") from error
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what Transformers makes where there are no files
            raise ValueError(f"{self.given} has no tokenizer: one of {len(tokenizer)} tokens was found. {needed}")
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise ValueError(
                    f"{self.given}: its tokenizer has no token for padding, and none for the end. Add one to "
                    "tokenizer_config.json, for example as pad_token."
                )
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def save(self, model: PreTrainedModel, folder: str | os.PathLike[str]) -> None:
        """Save ``model``, with the tokenizer of this source: ``folder`` changes when all is written, or not at all.

        Raises:
            OSError: If ``folder`` cannot be written.
        """

        def save_all(temporary: Path) -> None:
            model.save_pretrained(temporary)
            self.copy_tokenizer(temporary)

        atomic_save(save_all, folder, {})

    def copy_tokenizer(self, folder: Path) -> None:
        """Copy the files of tokenizer and processor, if there are any, to ``folder``."""
        source = self.folder or Path(snapshot_download(self.given, allow_patterns=list(TOKENIZER_FILES)))
        for pattern in TOKENIZER_FILES:
            for path in source.glob(pattern) if source.is_dir() else ():
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)


def find_model(given: str, class_name: str | None = None) -> ModelSource:
    """Find the model that ``given`` names, and read its config.

    Args:
        given: A folder with a ``config.json``, the path of a config, or a name on the Hub.
        class_name: The class of Transformers to make of it, such as ``"AutoModelForCausalLM"``. None: the one that
            saved it, or else what its type is most often trained as.

    Raises:
        ValueError: If there is no such model, with the names that come near; if the config cannot be read; if there
            is no such class.
    """
    path = Path(given).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(_no_config(given, path))
    folder = path if path.exists() else None
    if folder is None:
        config = _config_of_name(given)
    else:
        _check_config_file(folder / "config.json" if folder.is_dir() else folder)
        config = AutoConfig.from_pretrained(folder)
    return ModelSource(given=given, folder=folder, config=config, model_class=_model_class(given, config, class_name))


def _config_of_name(given: str) -> PreTrainedConfig:
    """The config behind a name that is no path of this machine."""
    try:
        validate_repo_id(given)
        return AutoConfig.from_pretrained(given, local_files_only=not _is_reachable(given))
    except HFValidationError as error:  # './name', or too many slashes
        raise ValueError(f"There is no folder and no file {given!r}. {_near(given)}") from error
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{given!r} is no folder of this machine, and the Hub did not give a model of that name ({reason}). "
            f"{_near(given)}"
        ) from error


def _is_reachable(given: str) -> bool:
    """Whether the Hub answers: one request, where Transformers would ask five times for a file, half a minute long."""
    try:
        HfApi().model_info(given, timeout=10)
    except HfHubHTTPError:  # an answer, which Transformers tells better
        return True
    except (OSError, HTTPError):
        return False
    return True


def _check_config_file(path: Path) -> None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no config of a model: it cannot be read as JSON ({error}). {EXAMPLES}") from error
    found = content.get("model_type") if isinstance(content, dict) else None
    if found not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(found), list(CONFIG_MAPPING.keys()), n=3)
        hint = (
            f"Did you mean {_quoted(near)}?" if near else "Needed is one of Transformers, such as 'bert' or 'llama'."
        )
        raise ValueError(f"{path} has model_type={found!r}, which Transformers does not know. {hint}")


def _model_class(given: str, config: PreTrainedConfig, class_name: str | None) -> Any:
    name = class_name or next(iter(getattr(config, "architectures", None) or ()), None)
    if name is None:
        name = next((guess for guess, configs in GUESSES if type(config) in configs), "AutoModel")
    found = getattr(transformers, name, None)
    if hasattr(found, "from_pretrained") and (hasattr(found, "from_config") or hasattr(found, "_from_config")):
        return found
    models = [known for known in dir(transformers) if known.startswith("AutoModel") or "For" in known]
    near = difflib.get_close_matches(name, models, n=3)
    hint = f"Did you mean {_quoted(near)}?" if near else "Use for example 'AutoModelForMaskedLM'."
    source = f"the class {name!r} was asked for, but" if class_name else f"its config names the class {name!r}, but"
    raise ValueError(f"{given}: {source} Transformers has no model of that name. {hint}")


def _no_config(given: str, folder: Path) -> str:
    """What to say of a folder without a config: often one above or below the one that was meant."""
    inner = sorted(path.parent for path in folder.glob("*/config.json"))
    if inner:
        return f"{given!r} holds no config.json. Did you mean {_quoted(map(str, inner[:3]))}?"
    names = sorted(path.name for path in folder.iterdir())
    found = f"only {', '.join(names[:5])}{' and more' if len(names) > 5 else ''}" if names else "nothing"
    return f"{given!r} holds no config.json, {found}. {EXAMPLES}"


def _near(given: str) -> str:
    """Models of this machine whose names come near ``given``: folders beside it, and what the Hub's cache holds."""
    path = Path(given).expanduser()
    beside = path.parent if path.parent.is_dir() else Path()
    folders = [str(found.parent) for found in beside.glob("*/config.json")]
    cache = Path(constants.HF_HUB_CACHE)
    cached = [found.name.removeprefix("models--").replace("--", "/") for found in cache.glob("models--*")]
    near = difflib.get_close_matches(os.path.normpath(given), [*folders, *cached], n=3, cutoff=0.6)
    return f"Did you mean {_quoted(near)}?" if near else EXAMPLES


def _quoted(names: Iterable[str]) -> str:
    return " or ".join(map(repr, names))
