"""Push a compressed model to the Hub in one commit: weights, config, tokenizer and a model card of measured values."""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from hf_comera.hub.cards import adopt_own_part, check_repo_id, has_own_part, require_compressed, write_model_card
from hf_comera.hub.inspection import inspect_checkpoint, weight_files
from hf_comera.hub.source import TOKENIZER_FILES, find_model

__all__ = ["push_folder", "push_to_hub"]

COMMIT_MESSAGE = "Upload tensor-train model with hf_comera"


def push_to_hub(
    model: PreTrainedModel,
    repo_id: str,
    *,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    commit_message: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    **card_fields: Any,
) -> CommitInfo:
    """Save ``model``, ``tokenizer`` and a model card to the Hub repository ``repo_id``, made if it is not there.

    Everything is written to a temporary folder first, so a setting that is refused leaves the Hub as it was. The text
    that a card on the Hub has outside hf_comera's part is kept.

    Args:
        model: A compressed model.
        repo_id: ``"user/name"``, or ``"name"`` for the account of ``token``.
        tokenizer: Tokenizer or processor to store beside the model.
        commit_message: Title of the commit.
        private: Whether a new repository is private. None: the account's default.
        token: Access token. None: the one that ``hf auth login`` stored.
        revision: Branch to write to, made if it is not there. None: ``main``.
        create_pr: Open a pull request instead of writing to the branch.
        **card_fields: ``base_model``, ``training_data``, ``metrics``, ``license``, ``language`` and
            ``training_command`` of :func:`hf_comera.write_model_card`.

    Returns:
        The commit; ``.commit_url`` shows it.

    Raises:
        ValueError: If the model is not compressed, ``repo_id`` is no name of a repository, or the card cannot be
            written from ``card_fields``.
    """
    require_compressed(model)
    check_repo_id(repo_id)
    api = HfApi(token=token)
    repo_id = _full_name(api, repo_id)
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        _fetch_card(api, repo_id, revision, folder)
        model.save_pretrained(folder)
        write_model_card(model, folder, repo_id=repo_id, **card_fields)  # names the id of the save
        _make_repository(api, repo_id, revision, private)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message or COMMIT_MESSAGE,
            revision=revision,
            create_pr=create_pr,
        )


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    commit_message: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Upload a saved compressed model as it is, in one commit: weights, config, tokenizer and card, nothing else.

    The card is that of the folder with the id of the repository in it, or a new one where the folder has none of
    hf_comera. The text that a card on the Hub has outside hf_comera's part is kept.

    Args:
        folder: Where ``save_pretrained`` wrote the model.
        repo_id: ``"user/name"``, or ``"name"`` for the account of ``token``.
        commit_message: Title of the commit.
        private: Whether a new repository is private. None: the account's default.
        token: Access token. None: the one that ``hf auth login`` stored.
        revision: Branch to write to, made if it is not there. None: ``main``.
        create_pr: Open a pull request instead of writing to the branch.

    Returns:
        The commit; ``.commit_url`` shows it.

    Raises:
        ValueError: If the folder holds no compressed model or a damaged one, ``repo_id`` is no name of a repository,
            or a card cannot be read.
    """
    check_repo_id(repo_id)
    place = inspect_checkpoint(folder).folder
    patterns = ("*config.json", "model.safetensors.index.json", *TOKENIZER_FILES)
    files = {path for pattern in patterns for path in place.glob(pattern) if path.is_file()}
    api = HfApi(token=token)
    repo_id = _full_name(api, repo_id)
    with TemporaryDirectory() as directory:
        card = _card_for_hub(api, repo_id, revision, place, Path(directory))
        _make_repository(api, repo_id, revision, private)
        return api.create_commit(
            repo_id,
            [CommitOperationAdd(path.name, path) for path in (*sorted(files), *weight_files(place), card)],
            commit_message=commit_message or COMMIT_MESSAGE,
            revision=revision,
            create_pr=create_pr,
        )


def _card_for_hub(api: HfApi, repo_id: str, revision: str | None, folder: Path, scratch: Path) -> Path:
    """The card to push, written into ``scratch``; ``folder`` stays as it is."""
    own, card = folder / "README.md", scratch / "README.md"
    _fetch_card(api, repo_id, revision, scratch)
    if own.is_file() and has_own_part(own):
        return adopt_own_part(card, own, repo_id)
    if own.is_file() and not card.is_file():
        shutil.copyfile(own, card)
    for name in ("config.json", "tokenizer_config.json"):  # from which the card says how to load the model
        if (folder / name).is_file():
            shutil.copyfile(folder / name, scratch / name)
    return write_model_card(find_model(str(folder)).compressed_skeleton(), scratch, repo_id=repo_id)


def _full_name(api: HfApi, repo_id: str) -> str:
    return repo_id if "/" in repo_id else f"{api.whoami()['name']}/{repo_id}"


def _make_repository(api: HfApi, repo_id: str, revision: str | None, private: bool | None) -> None:
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)


def _fetch_card(api: HfApi, repo_id: str, revision: str | None, folder: Path) -> None:
    """Bring the card that the new one has to keep the text of into ``folder``; there may be none.

    A branch that is not there yet will start from ``main``, and so does its card.
    """
    try:
        api.hf_hub_download(repo_id, "README.md", revision=revision, local_dir=folder)
    except RevisionNotFoundError:
        _fetch_card(api, repo_id, None, folder)
    except LocalEntryNotFoundError:  # says that the Hub could not be reached, not that there is no card
        raise
    except (EntryNotFoundError, RepositoryNotFoundError):
        return
