"""Draws the pictures of `how_it_works.md` into `docs/pictures`: `python docs/draw.py`."""

import pathlib
from collections.abc import Callable

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
WHOLE, PADDING, INK = "#e8e8e8", "white", "#333333"
N = len(COLORS)


def canvas(width: float, height: float) -> plt.Axes:
    """A figure on which one unit is one unit, without axes; legible on a dark page too."""
    figure, axes = plt.subplots(figsize=(width * 0.55, height * 0.55), layout="constrained", facecolor="white")
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    return axes


def box(axes: plt.Axes, x: float, y: float, w: float, h: float, color: str, text: str = "") -> None:
    """A filled box with a word in it."""
    hatch = "////" if color == PADDING else None
    axes.add_patch(Rectangle((x, y), w, h, facecolor=color, edgecolor=INK, linewidth=0.8, hatch=hatch))
    dark = color in COLORS
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=8, color="white" if dark else INK)


def say(axes: plt.Axes, x: float, y: float, text: str, ha: str = "left", **options: object) -> None:
    """Words."""
    axes.text(x, y, text, ha=ha, va="center", fontsize=8.5, color=INK, **options)


def arrow(axes: plt.Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """From here to there."""
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=INK, linewidth=0.9))


def layouts(axes: plt.Axes) -> None:
    """Rows where the first dimension divides, flat where it does not."""
    say(axes, 0, 0.5, "rows: shape (8, 3) over 4 devices")
    for row in range(8):
        for column in range(3):
            box(axes, column, 1 + row * 0.6, 1, 0.6, COLORS[row // 2])
    for i in range(N):
        say(axes, 3.3, 1.6 + 1.2 * i, f"device {i}")
    say(axes, 7, 0.5, "flat: shape (5, 3), 15 elements in shares of 4, one of them padding")
    for i in range(15):
        box(axes, 7 + i % 3, 1 + (i // 3) * 0.6, 1, 0.6, COLORS[i // 4], str(i))
    arrow(axes, (10.3, 2.5), (11.5, 2.5))
    for i in range(16):
        color, text = (COLORS[i // 4], str(i)) if i < 15 else (PADDING, "")
        box(axes, 11.8 + (i % 4) * 0.9, 1 + (i // 4) * 0.8, 0.9, 0.6, color, text)
    for i in range(N):
        say(axes, 15.7, 1.3 + 0.8 * i, f"device {i}")


def evaluation(axes: plt.Axes) -> None:
    """A clipped update, line by line: what is split, partial and whole."""
    lines = [
        ("g", "the gradient", "split"),
        ("s = g * g", "elementwise: on the share", "split"),
        ("t = sum(s)", "each device adds up its share", "partial"),
        ("n = sqrt(t)", "needs t whole: one psum of one number", "whole"),
        ("c = min(1, 1 / n)", "on a whole number", "whole"),
        ("u = c * g", "elementwise: on the share", "split"),
    ]
    say(axes, 0, 0.5, "traced program", weight="bold")
    say(axes, 4.6, 0.5, "on four devices", weight="bold")
    for row, (equation, words, form) in enumerate(lines):
        y = 1.1 + row * 1.15
        say(axes, 0, y + 0.35, equation, family="monospace")
        for i in range(N):
            color = COLORS[i] if form != "whole" else WHOLE
            width = 1.3 if form == "split" else 0.5
            box(axes, 4.6 + i * 1.6 + (1.3 - width) / 2, y, width, 0.7, color)
        if form == "whole" and lines[row - 1][2] == "partial":
            axes.plot([5.25, 5.25 + (N - 1) * 1.6], [y - 0.25] * 2, color=INK, linewidth=2.5)
            for i in range(N):
                axes.plot([5.25 + i * 1.6] * 2, [y - 0.45, y - 0.25], color=INK, linewidth=0.9)
                arrow(axes, (5.25 + i * 1.6, y - 0.25), (5.25 + i * 1.6, y + 0.03))
        say(axes, 11.3, y + 0.35, f"{form}: {words}")


def bucket(axes: plt.Axes) -> None:
    """Small leaves joined for one reduce-scatter."""
    say(axes, 0, 0.5, "three gradients, whole on this device")
    sizes = (1.0, 2.0, 0.6)
    x = 0.0
    for name, size in zip("abc", sizes, strict=True):
        for i in range(N):
            box(axes, x, 1 + i * 0.8, size, 0.7, COLORS[i], name)
        x += size + 0.5
    arrow(axes, (5.2, 2.6), (6.4, 2.6))
    say(axes, 6.7, 0.5, "joined: [4, k]")
    for i in range(N):
        left = 6.7
        for name, size in zip("abc", sizes, strict=True):
            box(axes, left, 1 + i * 0.8, size, 0.7, COLORS[i], name)
            left += size
    arrow(axes, (10.6, 2.6), (12.6, 2.6))
    say(axes, 11.6, 2.1, "reduce-scatter", ha="center")
    say(axes, 12.9, 0.5, "this device's row, summed")
    left = 12.9
    for name, size in zip("abc", sizes, strict=True):
        box(axes, left, 2.25, size, 0.7, COLORS[1], name)
        left += size


def gather_on_use(axes: plt.Axes) -> None:
    """Three layers, forward and backward: when each is whole."""
    steps = ["x @ w0", "x @ w1", "x @ w2", "loss", "d @ w2'", "d @ w1'", "d @ w0'"]
    held = [(0, 0, 0), (1, 1, 1), (2, 2, 4), (1, 5, 5), (0, 6, 6)]  # the last layer is still there for the way back
    left, wide = 3.0, 2.1
    for i, step in enumerate(steps):
        box(axes, left + i * wide, 0.9, wide - 0.2, 0.8, WHOLE, step)
        if i:
            arrow(axes, (left + i * wide - 0.2, 1.3), (left + i * wide, 1.3))
    say(axes, 0, 1.3, "program")
    say(axes, left, 0.4, "forward")
    say(axes, left + 4 * wide, 0.4, "backward")
    for layer in range(3):
        say(axes, 0, 2.55 + layer * 0.9, f"w{layer} whole")
        axes.plot([left, left + 7 * wide - 0.2], [2.55 + layer * 0.9] * 2, color=WHOLE, linewidth=6, zorder=0)
    for layer, first, last in held:
        box(axes, left + first * wide - 0.5, 2.25 + layer * 0.9, (last - first) * wide + wide + 0.3, 0.6, COLORS[layer])
    say(axes, 0, 5.5, "gradients")
    for layer, step in ((2, 4), (1, 5), (0, 6)):
        x = left + step * wide + wide - 0.2
        arrow(axes, (x - wide / 2, 1.7), (x - 0.4, 5.2))
        box(axes, x - 1.2, 5.2, 1.2, 0.6, COLORS[layer], "scatter")


PICTURES: dict[str, tuple[Callable[[plt.Axes], None], float, float]] = {
    "layouts": (layouts, 17.5, 6),
    "evaluation": (evaluation, 19.5, 8),
    "bucket": (bucket, 17.5, 4.4),
    "gather_on_use": (gather_on_use, 18, 6),
}


def main(folder: pathlib.Path) -> None:
    """Draws all of them."""
    mpl.rcParams.update({"svg.hashsalt": "jaxzero", "svg.fonttype": "none", "font.family": "sans-serif"})
    folder.mkdir(exist_ok=True)
    for name, (draw, width, height) in PICTURES.items():
        axes = canvas(width, height)
        draw(axes)
        axes.figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
        plt.close(axes.figure)


if __name__ == "__main__":
    main(pathlib.Path(__file__).parent / "pictures")
