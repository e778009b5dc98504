"""One entry point. Bad input is one clear line on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dpis import __version__
from dpis.app.commands.audit import audit
from dpis.app.commands.data import data
from dpis.app.commands.flags import GroupedCommand
from dpis.app.commands.plan import plan
from dpis.app.commands.report import report
from dpis.app.commands.train import train
from dpis.app.commands.using import evaluate, predict
from dpis.app.commands.verify import verify
from dpis.app.processes import INTERRUPTED, ProcessesError, tell
from dpis.errors import DpisError

BAD_INPUT = 2
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""Whatever a person can get wrong on the command line (typer names only some of them in public)."""

app = typer.Typer(
    name="dpis",
    help="Differentially private training for PyTorch with importance sampling.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=GroupedCommand)(train)
app.command()(evaluate)
app.command()(predict)
app.command()(report)
app.command(cls=GroupedCommand)(plan)
app.command()(verify)
app.command(cls=GroupedCommand)(audit)
app.add_typer(data)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dpis {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Differentially private training for PyTorch with importance sampling."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: list[str] | None = None) -> int:
    """Run a command of `dpis` and return its exit code."""
    return run(app, "dpis", arguments)


def run(commands: typer.Typer, name: str, arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code: the one door at which errors become a line."""
    try:
        command = typer.main.get_command(commands)
        words = sys.argv[1:] if arguments is None else list(arguments)
        code = command.main(words, prog_name=name, standalone_mode=False, obj=words)
        return int(code or 0)
    except _USAGE_ERROR as error:
        return _fail(_usage_message(error))
    except ProcessesError as error:
        return _fail(str(error), error.code)
    except DpisError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader went away (`dpis plan | head`)
        sys.stderr.close()
        return 0


def _usage_message(error: Exception) -> str:
    """Typer's own sentence, with the option it is about and where to read on."""
    message = str(getattr(error, "format_message", error.__str__)())
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "dpis"
    return f"{message.rstrip('.')}. See '{command} --help'"


def _fail(message: str, code: int = BAD_INPUT) -> int:
    tell("dpis: error: " + " ".join(message.split()), code)
    return code
