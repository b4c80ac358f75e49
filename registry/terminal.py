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

import io
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Style: TypeAlias = Literal["", "title", "dim", "good", "warn", "bad", "restore", "alias", "pin"]
Span: TypeAlias = tuple[str, Style]
Cell: TypeAlias = Sequence[Span]

GAP = 2  # cells between columns

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


def show(blocks: Iterable[Block]) -> None:
    """Print the blocks on the standard output."""
    from rich.console import Console

    out = sys.stdout
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


def _table(table: Table, width: int | None) -> list[Text]:
    columns = [column for column in table.columns if column.rank == 0 or any(column.cells)]
    titles = {id(column): _row_text([(column.title, "title")]) for column in columns}
    texts = {id(column): [_column_text(column, cell) for cell in column.cells] for column in columns}
    natural = {
        id(column): max([titles[id(column)].cell_len, *(_lines_width(text) for text in texts[id(column)])])
        for column in columns
    }
    left_out: list[Column] = []
    while width is not None and _least_width(columns, natural) > width:
        candidate = max(columns, key=lambda column: column.rank)
        if candidate.rank == 0:
            break
        columns.remove(candidate)
        left_out.append(candidate)

    fitted = {id(column): natural[id(column)] for column in columns}
    for column in columns:
        if column.stretch and width is not None:
            others = sum(fitted.values()) - fitted[id(column)] + GAP * (len(columns) - 1)
            fitted[id(column)] = max(min(natural[id(column)], width - others), min(8, natural[id(column)]))

    lines = []
    if any(column.title for column in columns):
        lines += _row(columns, [[titles[id(column)]] for column in columns], fitted)
    for index in range(len(columns[0].cells) if columns else 0):
        cells = [_cell_lines(texts[id(column)][index], column, fitted[id(column)]) for column in columns]
        lines += _row(columns, cells, fitted)
    if left_out:
        names = ", ".join(column.title for column in reversed(left_out))
        lines += _wrap(_text([(f"Left out at this width: {names}.", "dim")]), width)
    return lines


def _row(columns: Sequence[Column], cells: Sequence[Sequence[Text]], fitted: dict[int, int]) -> list[Text]:
    from rich.text import Text

    lines = []
    for index in range(max(map(len, cells))):
        line = Text(end="")
        for position, (column, parts) in enumerate(zip(columns, cells, strict=True)):
            part = parts[index].copy() if index < len(parts) else Text()
            blank = " " * max(fitted[id(column)] - part.cell_len, 0)
            line.append(" " * GAP if position else "")
            line.append(blank if column.right else "")
            line.append_text(part)
            line.append("" if column.right else blank)
        lines.append(line)
    return lines


def _least_width(columns: Sequence[Column], natural: dict[int, int]) -> int:
    widths = (
        min(natural[id(column)], column.least) if column.stretch else natural[id(column)]
        for column in columns
    )
    return sum(widths) + GAP * (len(columns) - 1)


def _cell_lines(text: Text, column: Column, width: int) -> list[Text]:
    if column.stretch == "wrap":
        return _wrap(text, width)
    if column.stretch == "cut" and text.cell_len > width:
        text = text.copy()
        text.truncate(width, overflow="ellipsis")
    return [text]


def _lines_width(text: Text) -> int:
    return max(part.cell_len for part in text.split("\n", allow_blank=True))


def _wrap(text: Text, width: int | None) -> list[Text]:
    from rich.console import Console

    if width is None:
        return list(text.split("\n", allow_blank=True))
    return list(text.wrap(Console(width=width), max(width, 8)))


def _text(cell: Cell) -> Text:
    from rich.text import Text

    text = Text(end="")
    for part, style in cell:
        text.append(printable(part), style=_STYLES[style])
    return text


def _row_text(cell: Cell) -> Text:
    return _text([(part.replace("\n", "\\n"), style) for part, style in cell])


def _column_text(column: Column, cell: Cell) -> Text:
    return _text(cell) if column.stretch == "wrap" else _row_text(cell)


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
