"""Plain text tables that fit the terminal's width."""

import itertools
import re
import shutil
from collections.abc import Sequence

#: Where a cell may be folded: behind a step of a key path, and at spaces.
_PIECES = re.compile(r"[^/ ]*(?:/+ *| +)|[^/ ]+")
#: Spaces before the lines of a row that continue it.
_INDENT = 2

Rows = Sequence[Sequence[str]]


def terminal_width() -> int:
    """Columns of the terminal; 80 where there is none. The variable `COLUMNS` overrides it."""
    return shutil.get_terminal_size().columns


def fold(text: str, width: int) -> list[str]:
    """A text in lines of at most `width` columns, broken at spaces and behind slashes.

    A name is broken only if it alone is wider than `width`.

    Examples:
      >>> fold("layers/[0-74]/attention/kernel", 16)
      ['layers/[0-74]/', 'attention/kernel']
    """
    lines = [""]
    for piece in _PIECES.findall(text):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]


def table(
    head: Sequence[str], rows: Rows, align: str = "", *, title: str = "", indent: int = 0, width: int | None = None
) -> str:
    """A table as text, no line wider than `width`.

    Where the natural widths do not fit, text columns are folded at spaces and slashes; where that is not enough
    either, a row takes several lines of whole cells.

    Args:
      head: Names of the columns; empty: no head.
      rows: The cells, as many in each row as `align` has characters.
      align: For each column ``"<"`` for text or ``">"`` for figures, which are never folded. Empty: text in the
        first column and figures in the others.
      title: A line above the head.
      indent: Spaces before each line.
      width: Columns; `None`: those of the terminal.

    Returns:
      The lines, without spaces at their ends.

    Examples:
      >>> print(table(("leaf", "bytes"), [("layers/w", "64 B"), ("b", "4.1 kB")], width=80))
      leaf       bytes
      ----------------
      layers/w    64 B
      b         4.1 kB
    """
    width = max(1, (terminal_width() if width is None else width) - indent)
    cells = [list(row) for row in ([head] if head else []) + list(rows)]
    if not cells:
        return "\n".join(fold(title, width)) if title else ""
    align = align or "<" + ">" * (len(cells[0]) - 1)
    groups, widths, gap = _arrange(cells, align, width)
    out = fold(title, width) if title else []
    for number, row in enumerate(cells):
        out += _lines(row, groups, widths, align, gap)
        if head and number == 0:
            out.append("-" * max(_extent(group, widths, gap) + (_INDENT if i else 0) for i, group in enumerate(groups)))
    return "\n".join((" " * indent + line).rstrip() for line in out)


def _arrange(cells: Rows, align: str, width: int) -> tuple[list[list[int]], list[int], int]:
    """The columns of each line of a row, the widths of all columns, and the spaces between them."""
    columns = list(range(len(align)))
    natural = [max(len(row[i]) for row in cells) for i in columns]
    gap = 2 if _extent(columns, natural, 2) <= width else 1
    if widths := _folded(cells, align, natural, width - gap * (len(columns) - 1)):
        return [columns], widths, gap
    widths = [min(w, max(1, width - _INDENT)) for w in natural]
    groups: list[list[int]] = [[]]
    for i in columns:
        room = width - (_INDENT if len(groups) > 1 else 0)
        if groups[-1] and _extent([*groups[-1], i], widths, 2) > room:
            groups.append([])
        groups[-1].append(i)
    return groups, widths, 2


def _folded(cells: Rows, align: str, natural: Sequence[int], room: int) -> list[int] | None:
    """Widths whose sum is at most `room`, the widest text columns narrowed; `None` where a name would be broken."""
    widths = list(natural)
    least = [
        max(max((len(p.rstrip()) for p in _PIECES.findall(row[i])), default=0) for row in cells) if a == "<" else w
        for i, (a, w) in enumerate(zip(align, natural, strict=True))
    ]
    while sum(widths) > room:
        spare = [i for i in range(len(widths)) if widths[i] > least[i]]
        if not spare:
            return None
        widths[max(spare, key=lambda i: widths[i])] -= 1
    return widths


def _extent(group: Sequence[int], widths: Sequence[int], gap: int) -> int:
    return sum(widths[i] for i in group) + gap * (len(group) - 1)


def _lines(
    row: Sequence[str], groups: Sequence[Sequence[int]], widths: Sequence[int], align: str, gap: int
) -> list[str]:
    """The lines of one row: one for each group of columns, more where a cell is folded."""
    out = []
    for number, group in enumerate(groups):
        folded = [fold(row[i], widths[i]) for i in group]
        for parts in itertools.zip_longest(*folded, fillvalue=""):
            padded = (f"{part:{align[i]}{widths[i]}}" for i, part in zip(group, parts, strict=True))
            out.append((" " * _INDENT if number else "") + (" " * gap).join(padded))
    return [line.rstrip() for line in out]
