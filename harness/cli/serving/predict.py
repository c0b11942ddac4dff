"""`python -m harness serving predict`, `what-if` and `validate`: serving from the times of kernels."""

from __future__ import annotations

import math
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import Command, OneOf, answer, json_option, parsed_by, several
from harness.errors import FAILED, OK, UsageError
from harness.files import require_writable
from harness.paths import command
from harness.report.terminal import show
from shapes.case import MOST_QUERIES
from shapes.names import unknown

if TYPE_CHECKING:
    from harness.serving.ledger import KernelChange
    from harness.serving.link.load import Load
    from harness.serving.link.model import Link
    from harness.serving.link.predictions import Outlook

KV = {"bf16": "bfloat16", "fp8": "fp8"}
"""Value of --kv-dtype -> the dtype as harness.serving.link.model has it."""
LENGTHS = re.compile(r"(?P<isl>\d+)/(?P<osl>\d+)(?:/(?P<ratio>\d+\.?\d*|\.\d+))?")
TIME = re.compile(r"(?P<number>[0-9]*\.?[0-9]+)(?P<unit>ms|s|us)?")
PARALLEL = re.compile(r"tp(?P<tp>\d+)(?:[ ,+]*ep(?P<ep>\d+))?")
MODELLED = ("fused_moe", "block_scale_gemm", "mla_decode", "mha_prefill", "all_reduce", "bf16_gemm",
            "absorbed_bmm", "elementwise")  # fmt: skip
"""The op classes that a message proposes: those that steps have."""
CHANGE_FORM = "OP[:PART][@decode|@prefill]=FACTORx[(LOW..HIGH)] or ...=saved:TIMEus[(LOW..HIGH)]"
NUMBER = r"[0-9]*\.?[0-9]+(?:e[0-9]+)?"
CHANGE = re.compile(
    rf"(?P<op>\w+)(?::(?P<part>[\w.]+))?(?:@(?P<phase>decode|prefill))?="
    rf"(?:(?P<factor>{NUMBER})x|saved:(?P<saved_us>{NUMBER})us)"
    rf"(?:\((?P<low>{NUMBER})\.\.(?P<high>{NUMBER})(?:x|us)?\))?"
)


def _hardware(word: str) -> str:
    """The GPU that an architecture stands for; another word as it is."""
    from harness.catalogue.architectures import named_sheet

    sheet = named_sheet(word)
    return str(sheet["name"]) if sheet else word


def _require_r1(name: str) -> None:
    """Raises ValueError for a model whose layers are not those of DeepSeek-R1."""
    from shapes.models import model, named_model

    asked = vars(named_model(name))
    r1 = vars(model("deepseek-r1")) | {key: asked[key] for key in ("name", "source")}
    differences = [f"{key} {value}" for key, value in asked.items() if value != r1[key]]
    if differences:
        what = f"times of {asked['name']} are not modelled, as it is no DeepSeek-R1"
        instead = f"`run --suite {name}-tpN` times its kernels, `engine` says what runs"
        raise ValueError(f"{what}: {', '.join(differences[:5])}; {instead}")


of_system = several(
    click.option("--model", metavar="NAME|DIR", default="deepseek-r1", callback=parsed_by(_require_r1),
                 expose_value=False, help="Serve this model, which has R1's layers.  [default: deepseek-r1]"),
    click.option("--hardware", metavar="NAME", default="", callback=parsed_by(_hardware),
                 help="Serve on this GPU: MI300X, H200, gfx942 ...  [default: that of --times, or H200]"),
    click.option("--engine", metavar="NAME", default="",
                 help="Serve with this engine.  [default: that of --times, or sglang]"),
    click.option("--parallel", metavar="tpN[,epN]", default="tp8", show_default=True, help="Use N GPUs."),
    click.option("--kv-dtype", type=OneOf([*KV]), default="bf16", show_default=True,
                 help="Keep the KV cache in this dtype."),
    click.option("--drafts", metavar="N", type=click.IntRange(0, MOST_QUERIES - 1),
                 help="Speculate with N tokens that the MTP layer drafts in each step.  [default: as results "
                      "of --calibrate say, or none]"),
    click.option("--accept-length", metavar="TOKENS", type=float,
                 help="Take this many tokens of a step, accepted drafts + 1.  [default: as results of "
                      "--calibrate say, or a range of published ones]"),
    click.option("--lengths", metavar="IN/OUT[/RATIO]", default="1024/1024", show_default=True,
                 help="Take requests of up to IN and OUT tokens, drawn from RATIO (0.8) times that."),
    click.option("--concurrency", metavar="N,N...", default="4,8,16,32,64", show_default=True,
                 help="Keep N requests in flight."),
    click.option("--times", multiple=True, metavar="PATH",
                 help="Take times of kernels from AIConfigurator's tables (SYSTEM/ENGINE/VERSION), or a run "
                      "of this suite. What is missing is assumed from data sheets."),
    click.option("--calibrate", multiple=True, metavar="FILE",
                 help="Calibrate on this server's results, of any client; two are enough."),
)  # fmt: skip


@click.command("predict", cls=Command)
@of_system
@click.option("--cases", metavar="FILE",
              help="Take the lengths and the concurrency of this file: see `shapes from`.")  # fmt: skip
@click.option("--warm", is_flag=True, help="Assume that the server has served before its first requests.")
@json_option("Write JSON there instead of tables.")
def predict(json_to: str | None, cases: str | None, **options: Any) -> None:
    """Predict TPOT, TTFT and throughput from times of kernels. They are of DeepSeek-R1 in FP8, with 90 %
    intervals."""
    require_writable(json_to, None)
    from shapes.deployment import Deployment
    from shapes.models import model as model_named

    deployment_of_cases = ""
    if cases:
        load, options["drafts"], deployment_of_cases = _read_cases(cases, options["drafts"])
        loads = [load]
    else:
        loads = loads_of(options["lengths"], options["concurrency"])
    model = model_of(options)
    predicted = Deployment(model_named("deepseek-r1"), model.structure.parallel, kv=options["kv_dtype"]).text
    if deployment_of_cases not in ("", predicted):
        note = f"{cases} is of {deployment_of_cases}: only its load and drafts are taken"
        model = replace(model, notes=(*model.notes, note))
    from harness.cli.serving.predict_display import as_json, prediction
    from harness.serving.link.predictions import outlook

    outlooks = [outlook(model, load) for load in loads]
    answer(json_to, as_json(model, outlooks), lambda: prediction(model, outlooks))


def _read_cases(path: str, drafts: int | None) -> tuple[Load, int | None, str]:
    """Load, drafts (the user's if it has none) and deployment (empty if unknown) of a file of cases. Raises
    UsageError where it has no load, and where the user gives another load or other drafts."""
    from harness.serving.link.load import Load
    from shapes.suites import cases_file

    try:
        file = cases_file(path)
    except ValueError as error:
        raise UsageError(str(error)) from None
    context = click.get_current_context()
    for name in ("lengths", "concurrency"):
        if context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            raise UsageError("give --cases, or --lengths and --concurrency")
    in_file = sorted(file.drafts)
    if drafts is None and len(in_file) == 1:
        drafts = in_file[0]
    elif in_file and drafts not in in_file:
        counts = " or ".join(map(str, in_file))
        raise UsageError(f"{path} has steps that verify {counts} drafts: give --drafts {counts}")
    load = file.load
    if not load:
        raise UsageError(f"{path} has no lengths and concurrency: only a client's results without times of "
                         "requests give them; give --lengths and --concurrency")  # fmt: skip
    isl, osl, concurrency = (int(load[name]) for name in ("isl", "osl", "concurrency"))
    return Load(isl, osl, concurrency, range_ratio=load["range_ratio"]), drafts, file.deployment


def model_of(options: dict[str, Any]) -> Link:
    """The model of the server that the options of `of_system` describe. Raises UsageError."""
    from harness.serving.link.model import System, link
    from harness.serving.link.validation import unvalidated

    match = PARALLEL.fullmatch(options["parallel"].strip().lower())
    if not match:
        raise UsageError(f"cannot read --parallel {options['parallel']!r}; write tp8, or tp8,ep8")
    names = ("hardware", "engine", "times", "calibrate", "drafts", "accept_length")
    tp, ep = int(match["tp"]), int(match["ep"] or 1)
    kv, warm = KV[options["kv_dtype"]], options.get("warm", False)
    system = System(**{name: options[name] for name in names}, tp=tp, ep=ep, kv=kv, warm=warm)
    model = link(system)
    return model if options["calibrate"] else replace(model, notes=(*model.notes, *unvalidated(model.system)))


def loads_of(lengths: str, concurrency: str) -> list[Load]:
    """A load for each concurrency: `8192/1024/0.8` and `4,8`. Raises UsageError."""
    from harness.serving.link.load import Load

    match = LENGTHS.fullmatch(lengths.strip())
    try:
        counts = [int(word) for word in concurrency.split(",")]
    except ValueError:
        raise UsageError(f"cannot read --concurrency {concurrency!r}; write 16 or 4,8,16") from None
    if not match:
        raise UsageError(f"cannot read --lengths {lengths!r}; write 8192/1024, or 8192/1024/1 for equal ones")
    isl, osl, ratio = int(match["isl"]), int(match["osl"]), float(match["ratio"] or 0.8)
    if isl == 0 or osl == 0 or ratio > 1:
        raise UsageError(f"--lengths {lengths}: at least 1 token each way, and a ratio from 0 to 1")
    return [Load(isl, osl, count, range_ratio=ratio) for count in counts]


@click.command("what-if", cls=Command)
@click.argument("changes", nargs=-1, metavar="[OP[:PART]=FACTORx...]")
@of_system
@click.option("--target-tpot", metavar="MS", help="Say which speedup of each op reaches this TPOT, too.")
@click.option("--ledger", metavar="FILE", help="Add the predictions there; `observe` adds what was seen.")
@json_option("Write JSON there instead of tables.")
def what_if(
    changes: tuple[str, ...], target_tpot: str | None, ledger: str | None, json_to: str | None, **options: Any
) -> None:
    """Predict what faster kernels are worth in serving. Changes count all together: mla_decode=2.0x,
    fused_moe=1.3x(1.2..1.4) with its 90 % interval, or block_scale_gemm:qkv_a@decode=saved:5us of each call.
    It also says what each op could give at most."""
    require_writable(json_to, None)
    parsed = [parse_change(text) for text in changes]
    if ledger and not parsed:
        raise UsageError("--ledger takes predictions of changes: name one, as mla_decode=2.0x")
    target_ms = _milliseconds(target_tpot) if target_tpot else None
    loads = loads_of(options["lengths"], options["concurrency"])
    model = model_of(options)
    from harness.cli.serving.predict_display import as_json, prediction
    from harness.serving.link.predictions import needs, outlook, predict

    outlooks = [
        replace(outlook(model, load), changes=predict(model, load, parsed) if parsed else (),
                needs=needs(model, load, target_ms))
        for load in loads
    ]  # fmt: skip
    rows = _record(Path(ledger), model, changes, outlooks, options) if ledger else []
    shown = (model, outlooks, changes, target_ms)
    answer(json_to, as_json(*shown), lambda: prediction(*shown))
    if ledger:
        to_observe = command("serving", "observe", ledger, rows[-1], "--before", "FILE", "--after", "FILE")
        text = f"\nrows written to {ledger}: {len(rows)}; once the change was measured:\n  {to_observe}"
        show(text, sys.stderr if json_to == "-" else sys.stdout)


def parse_change(text: str) -> KernelChange:
    """The change that a text describes: `mla_decode=2.0x`, `fused_moe=1.3x(1.2..1.4)`,
    `block_scale_gemm:qkv_a@decode=saved:5us`. Raises UsageError."""
    from harness.serving.ledger import KernelChange
    from harness.serving.names import OP_CLASSES

    match = CHANGE.fullmatch(text.replace(" ", ""))
    if not match:
        raise UsageError(f"cannot read change {text!r}; write for example mla_decode=2.0x, or {CHANGE_FORM}")
    if match["op"] not in OP_CLASSES:
        raise UsageError(unknown("op", match["op"], MODELLED))
    value = float(match["factor"] or match["saved_us"])
    if not 0 < float(match["low"] or value) <= value <= float(match["high"] or value) < math.inf:
        raise UsageError(f"cannot read change {text!r}: it must be positive and within its interval")
    return KernelChange.model_validate({name: field for name, field in match.groupdict().items() if field})


def _milliseconds(text: str) -> float:
    """`20ms`, `20` or `0.02s` -> 20.0. Raises UsageError."""
    match = TIME.fullmatch(text.strip())
    if not match or float(match["number"]) <= 0:
        raise UsageError(f"cannot read --target-tpot {text!r}; write 20ms")
    return float(match["number"]) * {"s": 1e3, "ms": 1.0, "us": 1e-3}[match["unit"] or "ms"]


def _record(
    ledger: Path, model: Link, changes: tuple[str, ...], outlooks: list[Outlook], options: dict[str, Any]
) -> list[str]:
    """Adds a row to the ledger for each load, and returns the names of the rows. A row is named after the
    system, the load and the changes. Raises UsageError where the ledger has a row of that name."""
    from harness.serving.ledger import ChangeEntry, PredictionEntry, append
    from harness.serving.schema import OfferedLoad

    entries: list[ChangeEntry | PredictionEntry] = []
    for outlook in outlooks:
        load = outlook.load
        workload = OfferedLoad(
            input_len=load.mean_isl, output_len=load.mean_osl, range_ratio=load.range_ratio, request_rate=0.0,
            concurrency=load.concurrency, num_prompts=load.concurrency * load.waves,
        )  # fmt: skip
        setting = model.setting.model_copy(update={"recv_interval": load.recv_interval, "workload": workload})
        row = (
            f"{model.system.hardware} {model.system.engine} {setting.note} {options['lengths']} "
            f"c{load.concurrency}: {', '.join(changes)}"
        )
        entries.append(ChangeEntry(row=row, changes=tuple(map(parse_change, changes)), setting=setting))
        to_repeat = _command(changes, options | {"concurrency": load.concurrency})
        for change in outlook.changes:
            entries.append(PredictionEntry(row=row, prediction=change, command=to_repeat))
    append(ledger, *entries)
    return list(dict.fromkeys(entry.row for entry in entries))


def _command(changes: tuple[str, ...], options: dict[str, Any]) -> str:
    """The command that predicts these changes with these options."""
    words = ["python", "-m", "harness", "serving", "what-if", *changes]
    for name, value in options.items():
        for text in value if isinstance(value, tuple) else (value,):
            if text not in (None, ""):
                words += [f"--{name.replace('_', '-')}", str(text)]
    return shlex.join(words)


@click.command("validate")
@click.option("--hardware", metavar="NAME", default="", callback=parsed_by(_hardware),
              help="Take only this GPU.")  # fmt: skip
@click.option("--engine", metavar="NAME", default="", help="Take only servers of this engine.")
@json_option("Write JSON there, with every point, instead of a table.")
def validate(hardware: str, engine: str, json_to: str | None) -> None:
    """Show how far predictions were off on public servers. It prints the errors of TPOT, mean TTFT and
    throughput, and how many points lie in their 90 % intervals: uncalibrated, calibrated on two points, and
    on all of the shortest lengths. The constants are those of other machines and engines; some kernel times
    of gfx942 (MI300X, MI325X) were fitted to MI325X's server. The exit code is 1 where over all servers TPOT
    is more than 7 % off when calibrated on the shortest lengths, or over those with drafts more than 10 %
    when calibrated on two points, or fewer than 85 % lie inside. `ledger` shows what changes of kernels were
    worth."""
    from harness.cli.serving.predict_display import validation, validation_json
    from harness.serving.link.validation import validated

    require_writable(json_to, None)
    found = validated(hardware, engine)
    answer(json_to, validation_json(found), lambda: validation(found))
    sys.exit(OK if hardware or engine or found.holds else FAILED)
