"""Plain text tables: the one printer of everything that `quire bench` and `quire doctor` show."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first is left-aligned, the others right-aligned."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    ruler = ["-" * width for width in widths]
    return "\n".join(_format_line(line, widths) for line in [lines[0], ruler, *lines[1:]])


def _format_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    return "  ".join([first, *rest]).rstrip()


def format_rate(value: float) -> str:
    """A rate with three significant digits and thousands marks: 8.62, 86.2, 862, 8,620."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def format_megabytes(size_bytes: int) -> str:
    """Bytes as MB (10^6)."""
    return f"{size_bytes / 1e6:,.0f}"
