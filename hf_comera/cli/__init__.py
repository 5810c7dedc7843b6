"""The command line, ``hf-comera``: one file a command, each the face of a public function; here they are assembled."""

import typer

from hf_comera.cli import (
    build_kernels,
    compress,
    doctor,
    estimate,
    explain,
    export,
    inspect,
    merge,
    plan,
    push,
    run,
)
from hf_comera.cli.refusals import Commands

__all__ = ["app"]

app = typer.Typer(
    name="hf-comera",
    cls=Commands,
    help="Train Hugging Face models in tensor-train form. Start with **plan MODEL**, what becomes what, or "
    "with **doctor**, what this machine can do. Every command has --help with examples.",
    epilog="Training itself is Python: three lines in your own script, see the README. A model is a folder, a "
    "config.json or a name on the Hub; local ones need no network.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)

BEFORE, SAVED, MACHINE = "Before training", "With a saved model", "This machine"

app.command("plan", rich_help_panel=BEFORE)(plan.plan_command)
app.command("estimate", rich_help_panel=BEFORE)(estimate.estimate_command)
app.command("explain", rich_help_panel=BEFORE)(explain.explain_command)
app.command("compress", rich_help_panel=BEFORE)(compress.compress_command)
app.command("inspect", rich_help_panel=SAVED)(inspect.inspect_command)
app.command("run", rich_help_panel=SAVED, context_settings=run.SETTINGS)(run.run_command)
app.command("merge", rich_help_panel=SAVED)(merge.merge_command)
app.command("export", rich_help_panel=SAVED)(export.export_command)
app.command("push", rich_help_panel=SAVED)(push.push_command)
app.command("doctor", rich_help_panel=MACHINE)(doctor.doctor_command)
app.command("build-kernels", rich_help_panel=MACHINE)(build_kernels.build_kernels_command)
