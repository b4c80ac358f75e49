"""Print lines and tables, on a terminal as wide as it is and into a pipe as wide as they are.

Rules
- Colours only on a terminal, and never with `NO_COLOR`. Words and symbols alone carry the meaning.
- A table that is too wide leaves out its least important columns and says which; the one stretching column is then
  wrapped or cut. Into a pipe (without `COLUMNS`) every row is one whole line.
- Text from users never moves the cursor: control characters are shown escaped.
- Where the output's encoding lacks the symbols, plain ASCII of the same width takes their place.

`rich` is imported where something is drawn, since `--json` has to answer without it.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Style: TypeAlias = Literal["", "title", "dim", "good", "warn", "bad", "restore", "alias", "pin"]
Span: TypeAlias = tuple[str, Style]
Cell: TypeAlias = Sequence[Span]

GAP = 2  # cells between columns
NARROWEST = 8  # cells that a stretching column has however narrow the terminal is

_STYLES: dict[Style, str] = {
    "": "",
    "title": "bold",
    "dim": "dim",
    "good": "bold green",
    "warn": "yellow",
    "bad": "bold red",
    "restore": "magenta",
    "alias": "cyan",
    "pin": "blue",
}
_SYMBOLS = "●○·│─╯┴┼⤺→…–✓×≤"
_ASCII = str.maketrans(_SYMBOLS, "*o.|-'++<>~-+x<")


@dataclass(frozen=True)
class Line:
    """A sentence, wrapped where the terminal ends."""

    cell: Cell = ()


@dataclass(frozen=True)
class Column:
    """One column of a table; one without any content is not drawn."""

    title: str
    cells: Sequence[Cell]
    rank: int = 0
    """0: always shown. Of the others the highest is left out first."""
    right: bool = False
    """Whether it is aligned to the right, as numbers are."""
    stretch: Literal["", "cut", "wrap"] = ""
    """What happens to it when the table is too wide; at most one column of a table has this."""
    least: int = 20
    """Cells that a stretching column keeps as long as another column can be left out."""


@dataclass(frozen=True)
class Table:
    """Columns of equal length, under one row of titles when there are any."""

    columns: Sequence[Column]


Block: TypeAlias = Line | Table


def words(*parts: str | Span) -> Cell:
    """Return a cell of plain and styled parts; empty ones are dropped."""
    spans = [(part, "") if isinstance(part, str) else part for part in parts]
    return tuple((text, style) for text, style in spans if text)  # type: ignore[misc]


def joined(cells: Iterable[Cell], gap: Span) -> Cell:
    """Return one cell of many, with a gap between them; empty ones are dropped."""
    spans: list[Span] = []
    for cell in cells:
        spans += [gap, *cell] if spans and cell else cell
    return tuple(spans)


def write(text: str) -> None:
    """Print ASCII text on the standard output.

    Raises:
        OSError: It could not be written.
    """
    out = _output()
    out.write(f"{text}\n")
    out.flush()


def complain(text: str) -> None:
    """Print a line on the standard error; where there is none, nobody is told."""
    typer.echo(printable(text), err=True)


def show(blocks: Iterable[Block]) -> None:
    """Print the blocks on the standard output.

    Raises:
        OSError: They could not be written.
    """
    from rich.console import Console

    out = _output()
    speaks_unicode = _can_encode(_SYMBOLS, out.encoding)
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")
    console = Console(
        file=out,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )
    for line in compose(blocks, _width(console)):
        if not speaks_unicode:
            line.plain = line.plain.translate(_ASCII)
        console.print(line, soft_wrap=True)
    # A reader that went away (`| head`) must be noticed here, where it is handled, not when Python shuts down.
    out.flush()


def compose(blocks: Iterable[Block], width: int | None) -> list[Text]:
    """Lay the blocks out in lines.

    Args:
        blocks: What to show.
        width: Cells of a line; None for as many as are needed.

    Returns:
        The lines, without trailing blanks.
    """
    lines: list[Text] = []
    for block in blocks:
        lines += _wrap(_text(block.cell), width) if isinstance(block, Line) else _table(block, width)
    for line in lines:
        line.rstrip()
    return lines


def printable(text: str) -> str:
    """Escape whatever could move the cursor, switch colours or hide text; line breaks are kept."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )


def _output() -> TextIO:
    if sys.stdout is None:
        # Closed by the caller (`>&-`): what is decided stands, but nobody hears the answer.
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return sys.stdout


@dataclass
class _Laid:
    """A column on its way to lines: its texts, and the cells that it is given."""

    column: Column
    title: Text
    texts: list[Text]
    width: int

    @property
    def least(self) -> int:
        return min(self.width, self.column.least) if self.column.stretch else self.width


def _table(table: Table, width: int | None) -> list[Text]:
    laid = [_lay(column) for column in table.columns if column.rank == 0 or any(column.cells)]
    left_out: list[str] = []
    if width is not None:
        while _full_width(each.least for each in laid) > width:
            candidate = max(laid, key=lambda each: each.column.rank)
            if candidate.column.rank == 0:
                break
            laid.remove(candidate)
            left_out.insert(0, candidate.column.title)
        for each in laid:
            if each.column.stretch:
                room = width - _full_width(other.width for other in laid if other is not each) - GAP
                each.width = max(min(each.width, room), min(each.width, NARROWEST))

    lines = []
    if any(each.column.title for each in laid):
        lines += _row(laid, [[each.title] for each in laid])
    for index in range(len(table.columns[0].cells)):
        lines += _row(laid, [_cell_lines(each, index) for each in laid])
    if left_out:
        lines += _wrap(_text([(f"Left out at this width: {', '.join(left_out)}.", "dim")]), width)
    return lines


def _lay(column: Column) -> _Laid:
    # Only a wrapped column may have several lines in a row; elsewhere a line break is shown escaped.
    texts = [_text(cell) if column.stretch == "wrap" else _one_line(cell) for cell in column.cells]
    title = _one_line([(column.title, "title")])
    widths = (part.cell_len for text in texts for part in text.split("\n", allow_blank=True))
    return _Laid(column, title, texts, max([title.cell_len, *widths]))


def _full_width(widths: Iterable[int]) -> int:
    found = list(widths)
    return sum(found) + GAP * (len(found) - 1)


def _row(laid: Sequence[_Laid], cells: Sequence[Sequence[Text]]) -> list[Text]:
    from rich.text import Text

    lines = []
    for index in range(max(map(len, cells))):
        line = Text()
        for position, (each, parts) in enumerate(zip(laid, cells, strict=True)):
            part = parts[index] if index < len(parts) else Text()
            blank = " " * max(each.width - part.cell_len, 0)
            line.append(" " * GAP if position else "")
            line.append(blank if each.column.right else "")
            line.append_text(part)
            line.append("" if each.column.right else blank)
        lines.append(line)
    return lines


def _cell_lines(each: _Laid, index: int) -> list[Text]:
    text = each.texts[index]
    if each.column.stretch == "wrap":
        return _wrap(text, each.width)
    if each.column.stretch == "cut":
        text.truncate(each.width, overflow="ellipsis")
    return [text]


def _wrap(text: Text, width: int | None) -> list[Text]:
    from rich.console import Console

    if width is None:
        return list(text.split("\n", allow_blank=True))
    return list(text.wrap(Console(width=width), max(width, NARROWEST)))


def _text(cell: Cell) -> Text:
    from rich.text import Text

    text = Text()
    for part, style in cell:
        text.append(printable(part), style=_STYLES[style])
    return text


def _one_line(cell: Cell) -> Text:
    return _text([(part.replace("\n", "\\n"), style) for part, style in cell])


def _width(console: Console) -> int | None:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    return console.width if sys.stdout.isatty() else None


def _can_encode(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
