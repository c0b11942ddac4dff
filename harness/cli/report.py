"""`python -m harness report`: recorded results as a page of charts and tables."""

from __future__ import annotations

import click


@click.command()
@click.argument("runs", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    default="report.html",
    show_default=True,
    metavar="FILE",
    help="Where to write the page.",
)
@click.option("--title", default="", help="The title of the page (default: what it shows).")
@click.option("--open", "show", is_flag=True, help="Open the page in the browser.")
@click.option("--svg", metavar="DIR", help="Write the charts there as SVG files, and no page.")
@click.option("--png", metavar="DIR", help="Write the charts there as PNG files, and no page.")
@click.option(
    "--chart",
    multiple=True,
    metavar="PATTERN",
    help="With --svg or --png: only charts with such a file name.",
)
def report(
    runs: tuple[str, ...],
    output: str,
    title: str,
    show: bool,
    svg: str | None,
    png: str | None,
    chart: tuple[str, ...],
) -> None:
    """Write recorded RUNS as a page that a browser opens from disk: rankings, sizes, roofline, rounds, flags,
    what moved between two runs, serving. RUNS are folders of runs or A/B tests, ledgers, and files that
    `serving predict`, `serving replay` or `compile` wrote with --json; a folder stands for all records below
    it."""
    from pathlib import Path

    if chart and not (svg or png):
        raise click.UsageError("--chart is for --svg and --png; a page has all")
    from harness.files import require_writable, require_writable_folder
    from harness.page.assemble import assemble, inputs
    from harness.page.html import pictures, write_page

    known = inputs(runs)
    folders = [(Path(folder), is_png) for folder, is_png in ((svg, False), (png, True)) if folder]
    for folder, _ in folders:
        require_writable_folder(folder)
    if not folders:
        require_writable(output, None)
    page = assemble(known, title)
    for folder, is_png in folders:
        click.echo(f"{len(pictures(page, folder, is_png, chart))} charts in {folder}")
    if folders:
        return
    write_page(page, output, ", ".join(runs))
    if output != "-":
        click.echo(f"{len(list(page.charts()))} charts in {output}", err=True)
    if show:
        click.launch(Path(output).resolve().as_uri())
