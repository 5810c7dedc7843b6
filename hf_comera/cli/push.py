"""``hf-comera push``: a saved compressed model to the Hub, the face of ``push_folder``."""

from typing import Annotated

import typer
from rich.console import Console

from hf_comera.cli.options import AsJson, print_json
from hf_comera.hub.push import push_folder

__all__ = ["push_command"]


def push_command(
    folder: Annotated[str, typer.Argument(help="Folder of a compressed checkpoint.", show_default=False)],
    repository: Annotated[str, typer.Argument(help="user/name, or name for your account.", show_default=False)],
    *,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(metavar="BRANCH", help="Default: main.")] = None,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Title of the commit.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a compressed model to the Hub in one commit: weights, config, tokenizer and model card.

    The card is that of the folder, or a new one of measured sizes and ranks. Text that others wrote on the Hub's card
    is kept. Log in first: hf auth login.

    Example: hf-comera push my-compressed-model me/my-compressed-model --private
    """
    commit = push_folder(
        folder,
        repository,
        private=private or None,
        revision=revision,
        commit_message=message,
        create_pr=create_pr,
    )
    if as_json:
        print_json({"commit": commit.oid, "url": str(commit.commit_url), "pull_request": commit.pr_url})
        return
    Console(highlight=False, soft_wrap=True).print(commit.pr_url or str(commit.commit_url), markup=False)
