"""Two runs: what became faster or slower between them, with the noise between the sessions."""

from __future__ import annotations

from typing import Any

from harness.page.document import Chart, PageSection, Table, TableRow, TableValue, anchor
from harness.page.measured.case import interval_ends, us_text
from harness.page.measured.forest import forest
from harness.report.text import uncertain_ratio
from harness.results.comparison import Compared
from harness.results.recorded import RecordedRun


def moved(a: RecordedRun, b: RecordedRun, comparison: Compared) -> PageSection:
    import altair as alt

    values: list[dict[str, Any]] = []
    rows = []
    for row in comparison.rows:
        ratio = row.comparison
        low, high = interval_ends(ratio.ratio, ratio.low, ratio.high)
        text = " ".join(uncertain_ratio(ratio.ratio, ratio.low, ratio.high)).strip()
        values.append(
            {
                "name": f"{row.name} at {row.case}",
                "ratio": ratio.ratio,
                "low": low,
                "high": high,
                "text": text,
                "verdict": ratio.verdict,
                "drift": "drift of the machine" if row.drift else "",
            }
        )
        rows.append(
            TableRow(
                [
                    row.case,
                    row.name,
                    TableValue(us_text(row.a_us), row.a_us),
                    TableValue(us_text(row.b_us), row.b_us),
                    TableValue(text, ratio.ratio),
                    ratio.verdict if row.baseline else "absolute times",
                    "yes" if row.changed else "" if row.changed is None else "no",
                ]
            )
        )
    noise = alt.Chart({"values": [{"from": 1 / (1 + comparison.noise), "to": 1 + comparison.noise}]})
    picture = forest(
        values,
        "time in A over time in B",
        noise.mark_rect(color="#8883").encode(x="from:Q", x2="to:Q"),
        [
            alt.Tooltip("name:N", title="row"),
            alt.Tooltip("text:N", title="B vs A"),
            alt.Tooltip("verdict:N"),
            alt.Tooltip("drift:N"),
        ],
    )
    columns = ("case", "implementation", "A, us", "B, us", "B vs A", "verdict", "changed")
    regressions = len(comparison.regressions)
    return PageSection(
        anchor("moved", str(a.folder), str(b.folder)),
        f"{a.run.id} to {b.run.id}",
        f"{regressions} regressed" if regressions else "nothing regressed",
        [
            Chart(
                anchor("moved-rows", str(a.folder), str(b.folder)),
                "What moved",
                "Right of 1: faster in B. The grey band is what unchanged rows moved by between the "
                "sessions: what lies in it is no change.",
                picture if values else None,
                Table(columns, rows, frozenset({"A, us", "B, us", "B vs A"})),
                len(values),
            )
        ],
        [
            ("A", f"{a.folder} ({a.run.created}, commit {a.commit})"),
            ("B", f"{b.folder} ({b.run.created}, commit {b.commit})"),
            ("noise", f"{comparison.noise:.1%}, {comparison.noise_from}"),
            *(("differs", note) for note in comparison.notes),
            *(("in one run only", text) for text in comparison.missing),
        ],
    )
