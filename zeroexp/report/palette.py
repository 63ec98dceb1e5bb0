"""Names and colours of what reports draw, the same in every picture. Pure.

The colours are Okabe and Ito's, made for any colour vision; the green is lightened to keep black numbers on it
readable. Wherever a colour tells something, a pattern, a symbol or a word tells it too.
"""

from __future__ import annotations

from zeroexp.measure.record import KINDS

BLUE, ORANGE, GREEN, PINK, GREY = "#56b4e9", "#e69f00", "#3fb992", "#cc79a7", "#c9c9c9"
RED, YELLOW, NAVY, BROWN, VIOLET = "#d55e00", "#f0e442", "#0072b2", "#a6761d", "#6a51a3"

# Kind of memory -> its name and colour.
KIND_LOOKS = {
    "parameters": ("parameters", BLUE),
    "gradients": ("gradients", ORANGE),
    "optimizer": ("optimizer state", GREEN),
    "master": ("master weights", PINK),
    "secondary": ("secondary copy", BROWN),
    "buffers": ("buffers", GREY),
    "outer": ("outer optimizer", VIOLET),
}
# What bytes are for, as measure/record.py names causes.
CAUSE_COLOURS = {
    **{kind: KIND_LOOKS[kind][1] for kind in KINDS if kind != "buffers"},
    "pools": "#7f9ed6",
    "buckets": RED,
    "shared memory": "#a3a3a3",
    "activations": YELLOW,
    "logits": "#b8a800",
    "temporaries": GREY,
    "backend": "#8a8a8a",
    "other": "#e3e3e3",
}
# Kinds of messages and phases of a step; a kind that is not named here gets a colour by its place.
PART_COLOURS = {
    "forward": BLUE,
    "backward": ORANGE,
    "optimizer": GREEN,
    "step": PINK,
    "data": GREY,
    "hand_over": RED,
    "gather": BLUE,
    "secondary": BROWN,
    "reduce": ORANGE,
    "replicas": "#a58fd0",
    "matrices": NAVY,
    "publish": GREEN,
    "norm": PINK,
    "loss": YELLOW,
    "quiesce": "#a3a3a3",
    "by TCP": "#9db9dd",
}
# The timeline has its own, since it shows spans beside bytes by cause: no colour stands for two things.
SPAN_COLOURS = {
    **{"data": "#4d4d4d", "forward": NAVY, "backward": "#8c510a", "optimizer": "#1b7837"},
    **{"step": "#762a83", "gather": "#35978f", "reduce": "#b2182b", "hand_over": "#f4a582"},
    **{"publish": "#a6dba0", "norm": "#c2a5cf", "loss": "#dfc27d", "quiesce": "#80cdc1"},
}
SPARE = ("#1f1f7a", "#7a1f5c", "#5c7a1f")  # of spans that are not named above
SERIES = (NAVY, ORANGE, GREEN, RED, PINK, BLUE, "#8a8a8a", "#b8a800")
# Plotly has eight patterns, and a stack has up to thirteen parts: from the ninth part on the lines are closer.
SHAPES = ("", "/", ".", "x", "-", "\\", "|", "+")
SPARSE, DENSE = 6, 3  # pixels between lines
PATTERNS = [
    *({"shape": shape, "size": SPARSE} for shape in SHAPES),
    *({"shape": shape, "size": DENSE} for shape in SHAPES[1:]),
]
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "x", "hexagon")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def part_colour(name: str, index: int) -> str:
    return PART_COLOURS.get(name, SERIES[index % len(SERIES)])
