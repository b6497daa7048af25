"""Flame graphs: collapsed stacks as an SVG without scripts. Callers are above callees; width is time.

Colours mark the package. A frame's full name, share and own time are in its title, which browsers show on hover.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape

from steppe.records.profiling.sampler import WAITING, Stack
from steppe.records.profiling.svg import svg_document

WIDTH, _LEFT, _TOP, _ROW, _BOTTOM = 1200, 10, 34, 18, 34
_MIN_WIDTH = 0.4  # pixels; narrower frames are left out
_CHAR_WIDTH = 6.3  # pixels per character
_COLOURS = {
    "steppe": "#8ecae6",
    "torch": "#f4a261",
    "numpy, numba": "#e9c46a",
    "others": "#95d5b2",
}
_HOVER = "<style>.f:hover rect{stroke:#111;stroke-width:1.5}</style>"


@dataclass
class CallNode:
    """A function as called from one caller: seconds in it, and its callees."""

    name: str
    seconds: float = 0.0
    own_s: float = 0.0
    calls: dict[str, CallNode] = field(default_factory=dict)


def build_call_tree(name: str, stacks: Mapping[Stack, float]) -> CallNode:
    """Merge the stacks into one tree, at the functions they have in common."""
    root = CallNode(name)
    for stack, seconds in stacks.items():
        node = root
        node.seconds += seconds
        for function in stack:
            node = node.calls.setdefault(function, CallNode(function))
            node.seconds += seconds
        node.own_s += seconds
    return root


def flame_svg(role: str, stacks: Mapping[Stack, float]) -> str:
    """Draw the flame graph of one role, without its waiting time."""
    root = build_call_tree(role, {stack: seconds for stack, seconds in stacks.items() if stack != (WAITING,)})
    scale = (WIDTH - 2 * _LEFT) / root.seconds if root.seconds > 0 else 0.0
    frames = list(_frames(root, float(_LEFT), 0, scale, root.seconds))
    height = _TOP + _ROW * (1 + max((depth for depth, _ in frames), default=0)) + _BOTTOM
    waited_s = stacks.get((WAITING,), 0.0)
    waiting = f"; {waited_s:.1f} s of waiting are not drawn" if waited_s else ""
    title = f"{role}: {root.seconds:.1f} s at work{waiting}"
    return svg_document(WIDTH, height, title, [_HOVER, *(text for _, text in frames), *_legend(height)], left=_LEFT)


def top_functions(stacks: Mapping[Stack, float], count: int) -> list[tuple[str, float]]:
    """Return the functions with the most own time; native calls are included, waiting is not."""
    own: dict[str, float] = {}
    for stack, seconds in stacks.items():
        own[stack[-1]] = own.get(stack[-1], 0.0) + seconds
    own.pop(WAITING, None)
    return sorted(own.items(), key=lambda item: -item[1])[:count]


def _frames(node: CallNode, x: float, depth: int, scale: float, total_s: float) -> Iterator[tuple[int, str]]:
    width = node.seconds * scale
    if width < _MIN_WIDTH:
        return
    yield depth, _frame(node, x, _TOP + _ROW * depth, width, total_s)
    for called in sorted(node.calls.values(), key=lambda called: -called.seconds):
        yield from _frames(called, x, depth + 1, scale, total_s)
        x += called.seconds * scale


def _frame(node: CallNode, x: float, y: float, width: float, total_s: float) -> str:
    title = f"{node.name}: {100 * node.seconds / total_s:.1f} %, {node.seconds:.2f} s"
    title += f", {node.own_s:.2f} s of its own" if node.own_s else ""
    max_chars = int((width - 6) / _CHAR_WIDTH)
    label = _short(node.name)[: max(0, max_chars)] if max_chars >= 3 else ""
    text = f'<text class="t b" x="{x + 3:.1f}" y="{y + 13:.0f}">{escape(label)}</text>' if label else ""
    shape = f'<rect x="{x:.1f}" y="{y:.0f}" width="{max(0.3, width - 0.5):.1f}" height="{_ROW - 1}" rx="1" '
    return f'<g class="f"><title>{escape(title)}</title>{shape}fill="{_colour(node.name)}"/>{text}</g>'


def _short(name: str) -> str:
    """Shorten a name to method with class, or function with module."""
    return ".".join(name.replace(".<locals>", "").split(".")[-2:])


def _colour(name: str) -> str:
    package = name.partition(".")[0]
    if package in ("numpy", "numba"):
        return _COLOURS["numpy, numba"]
    return _COLOURS.get(package, _COLOURS["others"]) if "." in name else _COLOURS["steppe"]


def _legend(height: float) -> Iterator[str]:
    x = float(_LEFT)
    for label, colour in _COLOURS.items():
        yield f'<rect x="{x:.0f}" y="{height - 24}" width="14" height="14" rx="2" fill="{colour}"/>'
        yield f'<text class="t s" x="{x + 20:.0f}" y="{height - 13}">{label}</text>'
        x += 44 + 7.0 * len(label)
