"""Options of a command, made from the option table; help that is grouped as the table is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from dpis.options import Knob, default_in_words, knobs


def flag(
    table: type, name: str, *, required: bool = False, help: str | None = None
) -> inspect.Parameter:
    """The option of that name as a parameter of a command; None (False, no list) where it is not said.

    Args:
        table: where it is declared.
        name: of the field.
        required: it must be said.
        help: instead of what is declared.
    """
    one = knobs(table)[name]
    kind = shell_type(_types(table)[name])
    decorated = typer.Option(
        "--" + name.replace("_", "-"),
        help=help or _help(table, name, one, required),
        metavar=one.form or _choices(one),
        rich_help_panel=one.group,
        show_default=False,
    )
    absent = False if kind is bool else None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else absent,
        annotation=Annotated[kind if required or kind is bool else kind | None, decorated],
    )


def typed(words: Mapping[str, Any]) -> dict[str, Any]:
    """Of the parameters that a command was given, those that were typed."""
    return {
        name: word
        for name, word in words.items()
        if word is not None and word is not False and word != []
    }


@functools.cache
def _types(table: type) -> dict[str, Any]:
    return get_type_hints(table)


def _help(table: type, name: str, one: Knob, required: bool) -> str:
    symbol = f"{one.symbol}: " if one.symbol and one.symbol != name else ""
    default = "" if required else one.shell_default or default_in_words(table, name)
    return symbol + one.help + (f" [default: {default}]" if default else "")


def _choices(one: Knob) -> str | None:
    return "|".join(one.choices) if one.choices else None


def shell_type(annotation: Any) -> Any:
    """What typer makes of the words of the shell."""
    if get_origin(annotation) is tuple:
        return list[str]
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)] or [annotation]
    return kinds[0] if len(kinds) == 1 and kinds[0] in (bool, int, float) else str


def with_flags(parameters: Iterable[inspect.Parameter]) -> Callable[[Any], Any]:
    """Give a command these parameters in the place of its ``**options``."""

    def decorate(command: Any) -> Any:
        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [one for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD]
        keyword = inspect.Parameter.KEYWORD_ONLY
        first = [one for one in kept if one.kind is not keyword]
        last = [one for one in kept if one.kind is keyword]
        command.__signature__ = inspect.Signature([*first, *parameters, *last])
        return command

    return decorate


class GroupedCommand(TyperCommand):
    """A command whose help has a heading for every group of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, then every group in the order of its first option."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                heading = getattr(param, "rich_help_panel", None) or "Options"
                groups.setdefault(str(heading), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)
