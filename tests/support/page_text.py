"""A page's sections as text: all that it says, each table, and the data that its pictures draw."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from harness.page.document import Chart, PageSection, TableRow, TableValue, anchor
from harness.paths import ROOT

MOST = 16


def page_text(sections: Sequence[PageSection]) -> str:
    """Wherever the checkout is: its folder is left out of paths and baselines."""
    text = "\n".join(line for section in sections for line in _of_section(section, "=")) + "\n"
    return text.replace(f"{ROOT}/", "").replace(anchor(str(ROOT)), "checkout")


def _of_section(section: PageSection, level: str) -> Iterator[str]:
    yield f"{level} {section.title} [{section.anchor}]"
    yield section.headline
    yield from (f"{label}: {text}" for label, text in section.notes)
    for chart in section.charts:
        yield from ("", *_of_chart(chart))
    for inner in section.sections:
        yield from ("", *_of_section(inner, level + "="))


def _of_chart(chart: Chart) -> Iterator[str]:
    yield f"- {chart.title} [{chart.anchor}], {chart.marks} marks"
    yield chart.reading
    if chart.table is not None:
        columns = (f"{name}*" if name in chart.table.numeric else name for name in chart.table.columns)
        yield " | ".join(columns)
        yield from _shortened([_of_row(row) for row in chart.table.rows])
    from harness.page.style import specification

    whole = specification(chart)
    for param in whole.get("params", ()):
        yield f"  to choose: {param['bind']['options'] if 'bind' in param else param['select']}"
    drawn = whole | whole.get("spec", {})
    if sizes := {name: drawn[name] for name in ("facet", "resolve", "width", "height") if name in drawn}:
        yield f"  {json.dumps(sizes)}"
    told: set[str] = set()
    for layer in _layers(whole, whole.get("datasets", {}), whole.get("data"), set()):
        mark, encoding = layer["mark"], layer.get("encoding", {})
        fields = (f"{channel}={of['field']}" for channel, of in encoding.items() if "field" in of)
        style = (f"{name}={json.dumps(of)}" for name, of in sorted(mark.items()) if name != "type")
        kept = (f"only {json.dumps(of['filter'])}" for of in layer.get("transform", ()) if "filter" in of)
        yield " ".join([f"  {mark['type']}", *fields, *style, *kept])
        yield from _shortened([f"    {_compact(value)}" for value in layer["values"]])
        how = [f"    {channel}: {said}" for channel, of in encoding.items() if (said := _how(of))]
        yield from (line for line in how if line not in told)
        told.update(how)


def _how(encoding: Any) -> str:
    """Scales, titles, orders; of tooltips what they call each field."""
    if isinstance(encoding, list):
        return "; ".join(
            " as ".join(dict.fromkeys([of["field"], of.get("title", of["field"])])) for of in encoding
        )
    how = {name: of for name, of in encoding.items() if name not in ("field", "type")}
    return json.dumps(how, ensure_ascii=False) if how else ""


def _shortened(lines: list[str]) -> list[str]:
    """Of many, the first and what all come to."""
    if len(lines) <= MOST:
        return lines
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
    return [*lines[: MOST // 2], f"    ... {len(lines)} in all, {digest}"]


def _of_row(row: TableRow) -> str:
    return " | ".join(map(_of_cell, row.cells)) + (f" [{row.anchor}]" if row.anchor else "")


def _of_cell(cell: str | TableValue) -> str:
    return cell if isinstance(cell, str) else f"{cell.text} ({_rounded(cell.order)})"


def _layers(part: Any, datasets: Any, data: Any, told: set[str]) -> Iterator[dict[str, Any]]:
    """Of a picture, each with its data as `values`: its own, or once those that several share."""
    data = part.get("data", data)
    for inner in ("layer", "hconcat", "vconcat", "concat"):
        for child in part.get(inner, ()):
            yield from _layers(child, datasets, data, told)
    if isinstance(part.get("spec"), dict):
        yield from _layers(part["spec"], datasets, data, told)
    if "mark" in part:
        name = json.dumps(data)
        values = (datasets[data["name"]] if "name" in data else data.get("values", [])) if data else []
        yield part | {"values": [] if name in told else values}
        told.add(name)


def _compact(value: Any) -> str:
    return json.dumps({name: _rounded(of) for name, of in value.items()}, ensure_ascii=False)


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
