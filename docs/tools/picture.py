"""Draws docs/picture.svg, the picture of README. Run: python docs/tools/picture.py

Pure but for the last line: the same text each time, which a test compares with the file.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "picture.svg"
WIDTH, HEIGHT = 880, 430
INK, MUTED, PAPER, PANEL, LOST = "#1f2933", "#616e7c", "#ffffff", "#f3f6f9", "#c81e1e"
TABLETS = {"A": "#2f6fab", "B": "#c77b1e", "C": "#3a8f5c", "D": "#8a5aa8"}
NODES = ("ABD", "ABC", "BCD", "ACD", "")
"""Which tablets have a replica on each node; the last node is new."""
LEADERS = {"A": 0, "B": 1, "C": 1, "D": 3}
DEAD, NEWCOMER = 2, 4
NODE_WIDTH, NODE_STEP, NODE_TOP, NODE_LEFT = 148, 168, 288, 30


class Drawing:
    """SVG elements, in order."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str = PANEL, line: str = INK
    ) -> None:
        """A rounded rectangle."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{fill}" stroke="{line}"/>'
        )

    def text(
        self, x: float, y: float, words: str, *, size: int = 13, bold: bool = False, fill: str = INK
    ) -> None:
        """One line, centred at x."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}"{weight} fill="{fill}" text-anchor="middle">{escape(words)}</text>'
        )

    def arrow(self, path: str, *, line: str = MUTED, dashed: bool = False) -> None:
        """A line with a head at its end."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        head = "lost" if line == LOST else "ink"
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{line}" stroke-width="1.5"{dash} marker-end="url(#{head})"/>'
        )


def picture() -> str:
    """The whole SVG."""
    drawing = Drawing()
    _users(drawing)
    _control(drawing)
    for number, tablets in enumerate(NODES):
        _node(drawing, number, tablets)
    _heal(drawing)
    drawing.text(
        WIDTH / 2,
        HEIGHT - 12,
        "Each square is a replica of a tablet; a thick border marks the leader. Three replicas form one Raft group.",
        size=12,
        fill=MUTED,
    )
    body = "\n".join(drawing.parts)
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
        for name, colour in (("ink", MUTED), ("lost", LOST))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif" role="img">\n'
        f"<title>Stele: an operator, three masters, and nodes that hold replicas of tablets</title>\n"
        f'<defs>{heads}</defs>\n<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>\n{body}\n</svg>\n'
    )


def _users(drawing: Drawing) -> None:
    drawing.box(30, 16, 250, 46, fill=PAPER)
    drawing.text(155, 36, "kubectl apply", bold=True)
    drawing.text(155, 53, "TabletCluster, TabletGroup", size=12, fill=MUTED)
    drawing.box(600, 16, 250, 46, fill=PAPER)
    drawing.text(725, 36, "your programs", bold=True)
    drawing.text(725, 53, "Python, Spark, the stele command", size=12, fill=MUTED)


def _control(drawing: Drawing) -> None:
    drawing.box(30, 112, 250, 96)
    drawing.text(155, 134, "operator", bold=True)
    for line, words in enumerate(
        ("observes, plans one safe step,", "acts, reports the reason;", "makes pods and volumes")
    ):
        drawing.text(155, 156 + 17 * line, words, size=12, fill=MUTED)
    drawing.box(372, 112, 300, 96)
    drawing.text(522, 134, "masters", bold=True)
    drawing.text(522, 152, "the catalog: tables, tablets, nodes, changes", size=12, fill=MUTED)
    for number in range(3):
        drawing.box(392 + 90 * number, 164, 80, 32, fill=PAPER)
        drawing.text(432 + 90 * number, 184, "leader" if number == 0 else "follower", size=12)
    drawing.arrow("M155 62V108")
    drawing.arrow("M280 160H368")
    drawing.text(325, 152, "orders", size=12, fill=MUTED)
    drawing.arrow("M690 62C660 85 640 92 625 108")
    drawing.text(622, 84, "where?", size=12, fill=MUTED)
    drawing.arrow("M790 62V282")
    drawing.text(750, 236, "rows, Arrow", size=12, fill=MUTED)
    drawing.arrow("M290 284L392 212")
    drawing.text(390, 250, "heartbeats", size=12, fill=MUTED)
    drawing.arrow("M155 208V282")
    drawing.text(205, 250, "pods, volumes", size=12, fill=MUTED)


def _node(drawing: Drawing, number: int, tablets: str) -> None:
    left = NODE_LEFT + NODE_STEP * number
    dead = number == DEAD
    drawing.box(left, NODE_TOP, NODE_WIDTH, 92, line=LOST if dead else INK)
    drawing.text(
        left + NODE_WIDTH / 2, NODE_TOP + 20, f"node {number}", bold=True, fill=LOST if dead else INK
    )
    if dead:
        drawing.text(left + NODE_WIDTH / 2, NODE_TOP + 84, "machine lost", size=12, fill=LOST)
    if number == NEWCOMER:
        tablets = NODES[DEAD]
        drawing.text(left + NODE_WIDTH / 2, NODE_TOP + 84, "new copies", size=12, fill=MUTED)
    for place, tablet in enumerate(tablets):
        x = left + 14 + 42 * place
        colour = TABLETS[tablet]
        solid = not dead and number != NEWCOMER
        leads = LEADERS[tablet] == number and solid
        drawing.parts.append(
            f'<rect x="{x}" y="{NODE_TOP + 32}" width="34" height="34" rx="4" fill="{colour}" '
            f'fill-opacity="{0.9 if solid else 0.25}" stroke="{INK if leads else colour}" '
            f'stroke-width="{3 if leads else 1}"{"" if solid else " stroke-dasharray=" + chr(34) + "4 3" + chr(34)}/>'
        )
        drawing.text(x + 17, NODE_TOP + 54, tablet, bold=True, fill=PAPER if solid else INK)


def _heal(drawing: Drawing) -> None:
    start = NODE_LEFT + NODE_STEP * (NEWCOMER - 1) + NODE_WIDTH / 2
    end = NODE_LEFT + NODE_STEP * NEWCOMER
    top = NODE_TOP - 4
    drawing.arrow(f"M{start} {top}C{start + 20} 256 {end} 256 {end + 40} {top}", line=LOST, dashed=True)
    drawing.text(start - 30, 250, "copied from the survivors", size=12, fill=LOST)


if __name__ == "__main__":
    PICTURE.write_text(picture())
