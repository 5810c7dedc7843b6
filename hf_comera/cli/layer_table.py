"""Tables of compressed layers, one row for all that are alike, and the same as JSON."""

import re
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from hf_comera.compress import CompressionPlan, LayerPlan

__all__ = ["layer_table", "plan_as_json", "short_count", "size_line"]

NUMBERS = re.compile(r"\.\d+(?=\.|$)")
"""Of layers in a name; all that differ in them alone may share a row."""


def layer_table(plan: CompressionPlan, title: str, *, every_layer: bool = False) -> Table:
    """The plan in a width of 100: equal layers share a row, a ``*`` stands for their numbers; or one row a layer."""
    prefix = _shared_prefix(plan.layers)
    below = f", names below {prefix[:-1]}" if prefix else ""
    table = Table(
        title=f"{title}{below}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    errors = any(layer.error is not None for layer in plan.layers)
    table.add_column("layer", overflow="fold")
    for heading in ("n", "factors", "ranks", "dense", "now", "ratio", *(("error",) if errors else ())):
        table.add_column(heading, justify="left" if heading in ("factors", "ranks") else "right", max_width=18)
    for name, layers in _groups(plan.layers, every_layer).items():
        table.add_row(*_row(name.replace(prefix, "") if prefix else name, layers, errors))
    table.add_section()
    changed = sum(layer.dense_parameters for layer in plan), sum(layer.parameters for layer in plan)
    table.add_row("compressed layers", str(len(plan.layers)), "", "", *_sizes(*changed))
    table.add_row("whole model", "", "", "", *_sizes(plan.dense_parameters, plan.parameters))
    return table


def size_line(plan: CompressionPlan) -> str:
    """The sizes of the whole model in words."""
    return f"{plan.parameters:,} parameters, {plan.ratio:.1f}x fewer than the {plan.dense_parameters:,} of dense"


def plan_as_json(plan: CompressionPlan) -> dict[str, Any]:
    """All layers and the sizes of the whole model."""
    sizes = ("in_size", "out_size", "dense_parameters", "parameters")
    return {
        "dense_parameters": plan.dense_parameters,
        "parameters": plan.parameters,
        "ratio": round(plan.ratio, 4),
        "ties": plan.ties,
        "layers": [
            {"name": layer.name, **layer.to_json(), **{size: getattr(layer, size) for size in sizes}} for layer in plan
        ],
    }


def short_count(count: float) -> str:
    """Three digits and a unit."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {letter}"
    return f"{count:.3g}"


def _shared_prefix(layers: Sequence[LayerPlan]) -> str:
    """The first part of the names, with its dot, where all begin with it: that of the base model."""
    firsts = {layer.name.partition(".")[0] for layer in layers if "." in layer.name}
    return f"{firsts.pop()}." if len(firsts) == 1 and all("." in layer.name for layer in layers) else ""


def _groups(layers: Sequence[LayerPlan], every_layer: bool) -> dict[str, list[LayerPlan]]:
    """By the names to show; where the same pattern has layers of different shapes, each shape is a group."""
    groups: dict[tuple[object, ...], list[LayerPlan]] = {}
    for layer in layers:
        name = layer.name if every_layer else NUMBERS.sub(".*", layer.name)
        groups.setdefault((name, layer.in_factors, layer.out_factors, layer.ranks, layer.width), []).append(layer)
    names = [str(key[0]) for key in groups]
    return {
        name if names.count(name) == 1 else ", ".join(layer.name for layer in group): group
        for name, group in zip(names, groups.values(), strict=True)
    }


def _row(name: str, layers: list[LayerPlan], errors: bool) -> list[str]:
    first = layers[0]
    factors = " -> ".join("x".join(map(str, side)) for side in (first.in_factors, first.out_factors))
    if first.width is not None:
        factors += f" -> {first.out_size}"
    ranks = " ".join(map(str, first.ranks)) if any(first.ranks) or not first.ranks else "removed"
    sizes = _sizes(len(layers) * first.dense_parameters, len(layers) * first.parameters)
    return [name, str(len(layers)), factors, ranks, *sizes, *((_errors(layers),) if errors else ())]


def _sizes(dense: int, now: int) -> tuple[str, ...]:
    counts = (short_count(count).replace(" ", "") for count in (dense, now))
    ratio = dense / max(now, 1)
    return *counts, f"{ratio:.1f}x" if ratio < 100 else f"{ratio:.0f}x"


def _errors(layers: list[LayerPlan]) -> str:
    found = sorted({f"{layer.error:.2f}" for layer in layers if layer.error is not None})
    return found[0] if len(found) == 1 else f"{found[0]}..{found[-1]}" if found else ""
