"""A page with what pages may hold: charts of several kinds, names that look like HTML, a long table."""

from typing import Any

from harness.page.document import Chart, Page, PageSection, Table, TableRow, TableValue, anchor

HOSTILE = "</script><script>throw Error('ran')</script><img src=x onerror=throw>&\"'{{ 1 }}\u2028"
LONG = 5000
COLUMNS = ("implementation", "time (µs)", "verdict")


def records(count: int) -> list[dict[str, Any]]:
    """Times that are all different and in no order; the third's name is hostile."""
    names = [HOSTILE if i == 2 else f"{'vllm' if i % 2 else 'torch'}.kernel_{i}" for i in range(count)]
    return [{"name": name, "time": (i * 7919 % count) * 1.5 + 0.25} for i, name in enumerate(names)]


def table(name: str, rows: list[dict[str, Any]]) -> Table:
    """Texts of numbers are not in the numbers' order: 10.8 before 9.2, 1,000.2 before 2.0."""
    return Table(
        COLUMNS,
        [
            TableRow(
                (row["name"], TableValue(f"{row['time']:,.1f}", row["time"]), 'faster, "surely"'),
                anchor(name, str(i)),
            )
            for i, row in enumerate(rows)
        ],
        frozenset({"time (µs)"}),
    )


def dots(name: str, count: int, **properties: Any) -> Chart:
    import altair as alt

    rows = records(count)
    picture = (
        alt.Chart({"values": rows}, **properties)
        .mark_point(filled=True, size=80)
        .encode(
            x=alt.X("time:Q", title="time per call (µs)"),
            y=alt.Y("name:N", title=None, sort="x"),
            tooltip=["name:N", alt.Tooltip("time:Q", format=".2f")],
        )
    )
    reading = "A dot is a time per call; further left is faster."
    return Chart(anchor(name), name, reading, picture, table(name, rows), count)


def synthetic() -> Page:
    """Six charts, the last of them without a picture, the one before it with a long table."""
    return Page(
        f"Report of {HOSTILE}",
        "Two sessions on a machine, and what it could do at most",
        [
            PageSection(
                "attention",
                "Attention",
                "vLLM's kernel is 1.8 times as fast as torch over all 24 cases.",
                [dots("Times of attention", 8, width=420), dots(f"Dots of {HOSTILE}", 6)],
                [("Disturbed", "3 of 240 rounds"), ("Not measured", HOSTILE)],
                [
                    PageSection(
                        "decode",
                        "Decode",
                        "No difference was told from none.",
                        [dots("Batch 1", 4, width="container")],
                    )
                ],
            ),
            PageSection(
                "rest", "All that was measured", charts=[dots("Wide", 6, width=1400), long(), without()]
            ),
        ],
    )


def long() -> Chart:
    import altair as alt

    rows = records(LONG)
    picture = (
        alt.Chart({"values": rows}, width=420, height=160)
        .mark_bar()
        .encode(x=alt.X("time:Q", bin=True), y="count()", tooltip="count()")
    )
    return Chart("long", "Many rows", "A bar is how many took so long.", picture, table("long", rows))


def without() -> Chart:
    return Chart(
        "without",
        "Without a picture",
        "What there is stands in the table.",
        None,
        table("without", records(20)),
    )
