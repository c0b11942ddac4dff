"""`python -m harness engine`: what a serving engine runs for a deployment, and what is tuned for it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli import options
from harness.errors import UsageError
from harness.files import replace as replace_file
from harness.files import require_writable, require_writable_folder, write
from shapes.case import MOST_QUERIES

if TYPE_CHECKING:
    from harness.engine import EngineRequest, EngineView
    from shapes.models import ModelConfig
    from shapes.scheduler import Workload

OWN_OPTIONS = {
    **dict.fromkeys(("tp", "tp-size", "tensor-parallel-size"), "--tp N"),
    **dict.fromkeys(("ep", "ep-size", "expert-parallel-size", "enable-expert-parallel"), "--ep N"),
    **dict.fromkeys(("enable-dp-attention", "dp", "dp-size", "data-parallel-size"), "--dp-attention"),
    "kv-cache-dtype": "--kv bf16 or --kv fp8",
    **dict.fromkeys(("model", "model-path"), "--model NAME|DIR"),
    **dict.fromkeys(("chunked-prefill-size", "max-num-batched-tokens"), "--workload ...,chunk=TOKENS"),
    **dict.fromkeys(
        ("speculative-config", "speculative-num-steps", "speculative-num-draft-tokens"), "--drafts N"
    ),
}
"""A flag of SGLang or vLLM that says how a model is served -> the option of this command."""

REQUIRED = ("isl", "osl", "concurrency")
WORKLOAD = (*REQUIRED, "prompts", "chunk")  # what --workload takes


def _model(name: str) -> ModelConfig:
    """The model that a user names. Raises ValueError."""
    from shapes.models import named_model

    return named_model(name)


def _arch(name: str | None) -> str:
    """The architecture that a user names, by default that of this machine."""
    from kernels.platform import detect

    machine = detect()
    if not name and machine.kind == "cpu":
        click.echo("note: this is about the CPU of this machine; --arch names a GPU", err=True)
    return name or machine.arch


def _ops(names: tuple[str, ...]) -> list[str]:
    """The full names of ops. Raises UsageError."""
    from harness.plan.select import choose_op

    return [choose_op(name).name for name in names]


def parse_settings(texts: tuple[str, ...]) -> dict[str, str]:
    """The value of each variable and flag of --with. Raises ValueError, also for those of OWN_OPTIONS."""
    from kernels.engines.deploy import settings

    values = settings(texts)
    for name in values:
        if name in OWN_OPTIONS:
            raise ValueError(f"--with takes no --{name}: here it is {OWN_OPTIONS[name]}")
    return values


def parse_load(text: str | None) -> Workload | None:
    """The load that `isl=N,osl=N,concurrency=N` says; None for an empty text. By default there are as many
    prompts as the concurrency: more would repeat its steps. Raises ValueError."""
    from shapes.scheduler import Workload

    if not text:
        return None
    values: dict[str, int] = {}
    for word in text.split(","):
        name, _, number = word.strip().partition("=")
        if name not in WORKLOAD or not number.isdecimal():
            takes = ", ".join(f"{name}=N" for name in WORKLOAD)
            raise ValueError(f"--workload takes {takes}, not {word.strip()!r}")
        if name in values:
            raise ValueError(f"--workload has {name} twice")
        values[name] = int(number)
    missing = [name for name in REQUIRED if name not in values]
    if missing:
        raise ValueError(f"--workload needs {', '.join(missing)}")
    concurrency = values["concurrency"]
    prompts, chunk = values.get("prompts", concurrency), values.get("chunk", Workload.token_budget)
    return Workload(values["isl"], values["osl"], concurrency, prompts, token_budget=chunk)


def _path(text: str) -> Path | None:
    """A path; None for an empty word, which an unset variable of the shell leaves."""
    return Path(text) if text else None


deployment = options.several(
    click.option("--model", default="deepseek-r1", callback=options.parsed_by(_model), show_default=True,
                 metavar="NAME|DIR",
                 help="Serve a model of `list models`, or of a config.json or a folder with one."),
    click.option("--tp", type=click.IntRange(1), metavar="N", default=8, show_default=True,
                 help="Let the server have N ranks."),
    click.option("--ep", type=click.IntRange(1), metavar="N", default=1, show_default=True,
                 help="Let N ranks share the experts: all or one."),
    click.option("--dp-attention", is_flag=True, help="Give each rank requests of its own."),
    click.option("--kv", type=options.OneOf(["bf16", "fp8"]), default="bf16", show_default=True,
                 help="Keep the KV cache in this dtype."),
    click.option("--drafts", type=click.IntRange(0, MOST_QUERIES - 1), metavar="N",
                 help="Let a decode step verify N draft tokens of each request."),
)  # fmt: skip


@click.command(cls=options.Command)
@click.argument("engine", type=options.OneOf(["sglang", "vllm"]), metavar="sglang|vllm")
@click.option("--arch", metavar="NAME", callback=options.parsed_by(_arch),
              help="Ask about this GPU: MI300X, H200, gfx942 ...  [default: this machine's]")  # fmt: skip
@deployment
@click.option("--workload", callback=options.parsed_by(parse_load), metavar="isl=N,osl=N,concurrency=N",
              help="Serve this load; it also takes prompts=N and chunk=TOKENS.  [default: steps of batches "
              "of 1 to 128 requests, 3200 tokens in and 800 out]")  # fmt: skip
@options.cases_file
@click.option("--with", "given", multiple=True, callback=options.parsed_by(parse_settings),
              metavar="NAME=VALUE", help="Set this variable or flag for the engine.")  # fmt: skip
@click.option("--op", "ops", multiple=True, callback=options.parsed_by(_ops), metavar="OP",
              help="Take only this op.")  # fmt: skip
@click.option("--aiter", type=_path, metavar="PATH",
              help="Read AITER in a checkout, wheel, site-packages or image, or `recorded`.")  # fmt: skip
@click.option("--vllm", type=_path, metavar="PATH", help="Read vLLM there, in the same way.")
@click.option("--sglang", type=_path, metavar="PATH",
              help="Read SGLang there.  [default of all: what is installed, else recorded]")  # fmt: skip
@click.option("--triton", default="", metavar="VERSION",
              help="Assume this Triton, by which SGLang chooses files.  [default: its own]")  # fmt: skip
@click.option("--diff", nargs=2, type=Path, metavar="A B",
              help="Print the shapes for which two versions of a library differ.")  # fmt: skip
@click.option("--entries", is_flag=True, help="Print a row for each shape, with the entry of its table.")
@click.option("--write", "folder", type=_path, metavar="DIR",
              help="Write the misses there as the library's own tuner reads them.")  # fmt: skip
@click.option("--page", metavar="FILE", help="Write a page there: a map of shapes by tokens.")
@click.option("--csv", "csv_to", metavar="FILE|-", help="Write CSV there.")
@options.json_option("Write JSON there.")
@options.gathered("harness.engine:EngineRequest")
def engine(
    request: EngineRequest, diff: tuple[Path, Path] | None, entries: bool, folder: Path | None,
    page: str | None, csv_to: str | None, json_to: str | None, **libraries: Path | None,
) -> None:  # fmt: skip
    """Show what an engine runs for each shape, and why. For each shape of a deployment: the implementation
    and the line of source that decides it, the tuned table that it looks into, the entry that it finds or
    what runs instead, and known defects. The largest shares of the time come first. Only files are read; no
    GPU is needed."""
    from harness.engine import changes, engine_view
    from harness.report.engine_table import changes_text, engine_csv, engine_text
    from harness.report.terminal import show

    require_writable(json_to, csv_to)
    require_writable(page, None)
    if folder:
        require_writable_folder(folder)
    if diff and (entries or folder or page or csv_to):
        raise UsageError("--diff prints text or --json alone: leave --entries, --write, --page and --csv")
    if request.cases and (request.workload or request.drafts):
        raise UsageError("--cases has the shapes itself: leave --workload and --drafts")
    if request.triton and not request.triton[0].isdecimal():
        raise UsageError(f"--triton takes a version like 3.6.0, not {request.triton!r}")
    paths = {name: path for name in ("aiter", "vllm", "sglang") if (path := libraries[name])}
    request = replace(request, paths=paths, drafts=request.drafts or 0)  # --drafts is None by default
    if diff:
        changed = changes(request, *diff)
        if json_to:
            options.write_json(json_to, changed.facts())
        if json_to != "-":
            print(changes_text(changed))
        return
    view = engine_view(request)
    if json_to:
        options.write_json(json_to, view.facts())
    if csv_to:
        write(csv_to, engine_csv(view))
    if page:
        from harness.page.assemble import engine_page
        from harness.page.html import write_page

        write_page(engine_page(view), page, f"files of {', '.join(view.libraries) or 'the engine'}")
        if page != "-":
            click.echo(f"written: {page}", err=True)
    if folder:
        _write_untuned(view, folder)
    if "-" not in (json_to, csv_to, page):
        show(engine_text(view, entries), sys.stdout)


def _write_untuned(view: EngineView, folder: Path) -> None:
    """Writes AITER's CSV files of untuned shapes, and lists of the JSON files that an engine looks for and
    does not have. A file that would be empty is not written. Raises UsageError, before it writes anything, if
    that would replace a file with other contents."""
    texts = view.tables.untuned()
    for name, text in texts.items():
        # AITER's own folder has files of these names, which its users fill.
        if (folder / name).exists() and (folder / name).read_bytes() != text.encode():
            raise UsageError(f"{folder / name} is there and has other shapes; give --write another folder")
    for name, text in texts.items():
        replace_file(folder / name, text)
        click.echo(f"written: {folder / name}", err=True)
    misses = [shape for shape in view.shapes if shape.state == "fallback"]
    by_hand = sum(shape.row == "aiter.triton" for shape in misses)
    if by_hand:
        text = f"not written: {by_hand} shapes of aiter.triton; AITER tunes them one by one: "
        click.echo(text + "aiter/ops/triton/utils/_triton/tunning/screen.py", err=True)
    elif not texts:
        click.echo("nothing written: no file lacks a shape", err=True)
