"""`Picture`: boxes, arrows and text as SVG, on a white ground so that dark pages show it too.

Lengths are in pixels, from the upper left corner.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

Point = tuple[float, float]
#: Colours of adapters, and paler ones for grounds; the last is the base model's.
COLOURS = ("#2f6fde", "#d9822b", "#3a9a5b", "#a04fb5", "#8a9199")
PALE = ("#dce8fb", "#fbe8d3", "#dcf0e2", "#f0e0f4", "#eceef0")
INK, QUIET, LINE = "#1f2328", "#57606a", "#6e7781"
_FONT = "Helvetica, Arial, sans-serif"
_LINE_HEIGHT = 16.0


class Picture:
    """A drawing of one size. Text is as wide as the reader's font makes it: leave it a tenth more room."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self._title, self._width, self._height = title, width, height
        self._parts: list[str] = []

    def svg(self) -> str:
        """The whole file."""
        size = f'width="{self._width}" height="{self._height}" viewBox="0 0 {self._width} {self._height}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{_FONT}" font-size="13">',
            f"<title>{escape(self._title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0.5 L8 4 L0 7.5 z" fill="{LINE}"/></marker></defs>',
            f'<rect width="{self._width}" height="{self._height}" rx="8" fill="#ffffff"/>',
        )
        return "\n".join([*head, *self._parts, "</svg>", ""])

    def rectangle(
        self, place: Point, size: Point, fill: str = "#ffffff", edge: str = LINE, *, radius: float = 4, dashes: str = ""
    ) -> None:
        """A rectangle with its upper left corner at `place`. `dashes`: as in SVG; "" for a whole line."""
        (x, y), (width, height) = place, size
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
            f'stroke="{edge}"{dashed}/>'
        )

    def text(
        self,
        place: Point,
        lines: str | Sequence[str],
        *,
        anchor: str = "start",
        colour: str = INK,
        is_bold: bool = False,
        size: float = 13,
    ) -> None:
        """Lines of text, the base of the first at `place`. `anchor`: start, middle or end."""
        x, y = place
        for number, line in enumerate([lines] if isinstance(lines, str) else lines):
            weight = ' font-weight="bold"' if is_bold else ""
            self._parts.append(
                f'<text x="{x:g}" y="{y + number * _LINE_HEIGHT:g}" text-anchor="{anchor}" fill="{colour}" '
                f'font-size="{size:g}"{weight}>{escape(line)}</text>'
            )

    def box(self, place: Point, size: Point, title: str, lines: Sequence[str] = (), fill: str = "#ffffff") -> None:
        """A rectangle with a bold title and lines below it, all centred."""
        self.rectangle(place, size, fill)
        (x, y), (width, height) = place, size
        first = y + height / 2 - len(lines) * _LINE_HEIGHT / 2 + 5
        self.text((x + width / 2, first), title, anchor="middle", is_bold=True)
        self.text((x + width / 2, first + _LINE_HEIGHT), lines, anchor="middle", colour=QUIET, size=12)

    def arrow(self, *points: Point, is_double: bool = False, dashes: str = "") -> None:
        """A line through the points with a head at its end. Three points are a curve that the middle one pulls."""
        (x, y), *rest = points
        kind = "Q" if len(rest) == 2 else "L"
        path = f"M{x:g} {y:g} {kind} " + " ".join(f"{x:g} {y:g}" for x, y in rest)
        start = ' marker-start="url(#head)"' if is_double else ""
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.3" marker-end="url(#head)"{start}{dashed}/>'
        )

    def line(self, *points: Point) -> None:
        """A line through the points, without a head."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{LINE}"/>')
