"""`python -m harness serving ...`. Imports nothing heavy."""

from __future__ import annotations

import sys
from typing import Any

import click


@click.group()
def serving() -> None:
    """What a kernel is worth in a serving run: results, traces, the model and the ledger.

    \b
    python -m harness serving load FILE...       any client's results, in one schema, with what does not hold
    python -m harness serving compare A B        two results, if they are alike
    python -m harness serving audit [FILE...]    what does not hold in published documents, or in your results
    python -m harness serving recipe [NAME]      the published set-ups, ready to run on your own machine
    python -m harness serving trace FILE         where a step's time goes, and what of it is exposed
    python -m harness serving link --what-if mla_decode=2.0x
    python -m harness serving replay --swap mla_decode=vllm.amx
    python -m harness serving run --out DIR      a real engine and client here, arm by arm
    python -m harness serving experiment cpu-short
    python -m harness serving ledger             predicted, observed, residual
    """


@serving.command("load")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of a table.")
@click.option("--csv", "csv_to", metavar="FILE|-", help="Write one line for each metric there.")
def load_command(**options: Any) -> None:
    """Results of serving clients in one schema, each row held to what must hold between its numbers. Exit
    code 1 where something does not hold, 2 where a file cannot be read."""
    from harness.cli.serving.load import show

    sys.exit(show(**options))


@serving.command("ledger")
@click.argument("files", nargs=-1, metavar="[LEDGER...]")
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of a table.")
def ledger_command(**options: Any) -> None:
    """Kernel changes: what was predicted of serving, what was observed, the residual, and whether the one
    explains the other. Default: all ledgers under results/, and the published before/after points."""
    from harness.cli.serving.ledger import show

    sys.exit(show(**options))


@serving.command("observe")
@click.argument("ledger", metavar="LEDGER")
@click.argument("row", metavar="ROW")
@click.option("--before", multiple=True, required=True, metavar="FILE", help="Any client's results.")
@click.option("--after", multiple=True, required=True, metavar="FILE", help="As many; paired in order.")
@click.option("--explain", default="", metavar="TEXT", help="What is known of the difference, if anything.")
def observe_command(**options: Any) -> None:
    """Adds to a row of a ledger what serving runs showed before and after its change: TPOT, TTFT and output
    throughput, as far as predicted, with a 90 % t-interval over the pairs."""
    from harness.cli.serving.observe import show

    sys.exit(show(**options))


@serving.command("replay")
@click.option("--model", default="deepseek-r1", show_default=True, metavar="NAME|DIR",
              help="A model of `shapes`, or a folder with a config.json.")  # fmt: skip
@click.option(
    "--tp", type=click.IntRange(1), default=1, show_default=True, help="The rank is one of so many."
)
@click.option("--phase", type=click.Choice(["decode", "prefill"]), default="decode", show_default=True)
@click.option("--batch", default="4", show_default=True, metavar="N[,N...]", help="Requests in the step.")
@click.option("--ctx", default="1024", show_default=True, help="Decode: tokens cached of each request.")
@click.option("--new", default="1024", show_default=True, help="Prefill: new tokens of each request.")
@click.option("--layers", metavar="DENSE,MOE", help="Replay so many (default: all, or what memory holds).")
@click.option("--base", multiple=True, metavar="OP=IMPL[,...]", help="What the engine runs.")
@click.option("--swap", multiple=True, metavar="OP[:PLACE]=IMPL", help="An arm: the base with this instead.")
@click.option("--routing", default="balanced", show_default=True, help="A pattern: balanced, zipf:0.8 ...")
@click.option("--page", type=click.IntRange(1), help="Tokens of a KV page (default: 16 on CPUs, else 64).")
@click.option("--kv", type=click.Choice(["bf16", "fp8"]), default="bf16", show_default=True)
@click.option("--device", help="cpu, cuda, cuda:1 ... (default: the first GPU, else the CPU).")
@click.option("--launch", type=click.Choice(["graph", "eager"]), help="On GPUs (default: graph).")
@click.option("--threads", type=click.IntRange(1), help="CPU threads, as the engine has them.")
@click.option("--budget", default="60s", show_default=True, help="Time for measuring, set-up apart.")
@click.option(
    "--blocks", type=click.IntRange(2), default=6, show_default=True, help="Prepared anew so often."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", metavar="DIR", help="Keep the replay there, with every round.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there.")
def replay_command(out: str | None, json_to: str | None, **options: Any) -> None:
    """One step of one rank, rebuilt from the suite's implementations in the engine's order with weights for
    every layer; one op swapped at a time, all arms in interleaved rounds."""
    from harness.cli.serving.replay import show
    from harness.serving.replay.request import ReplayRequest

    sys.exit(show(ReplayRequest(**options), out, json_to))


@serving.command("run")
@click.option(
    "--model",
    default="default",
    show_default=True,
    metavar="DIR|default",
    help="A model's directory; `default` makes a small DeepSeek-V3 here.",
)
@click.option(
    "--engine",
    default="vllm",
    show_default=True,
    metavar="vllm|sglang|tensorrt-llm|COMMAND",
    help="What serves it; a command has {model}, {port} and {name} filled in.",
)
@click.option(
    "--client",
    default="",
    metavar="vllm|sglang|COMMAND",
    help="What loads it, by default the engine's own; a command has {url} and {result} in it.",
)
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="NAME[:ITEM ...]",
    help="An arm, with A=1, --flag=value or a swap such as mla_decode=torch; the first is the base.",
)
@click.option("--flag", "flags", multiple=True, metavar="FLAG", help="A flag of the engine for all arms.")
@click.option("--isl", default=512, show_default=True, type=click.IntRange(1), help="Input tokens.")
@click.option("--osl", default=96, show_default=True, type=click.IntRange(2), help="Output tokens.")
@click.option("--concurrency", default=4, show_default=True, type=click.IntRange(1))
@click.option("--prompts", default=4, show_default=True, type=click.IntRange(1), help="Requests in a run.")
@click.option("--pairs", default=4, show_default=True, type=click.IntRange(0), help="Runs of each arm.")
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Of the first pair.")
@click.option(
    "--slice",
    "slice_s",
    default=0.0,
    metavar="SECONDS",
    type=click.FloatRange(0, 10),
    help="Both runs of a pair at once, their engines (on CPUs) in turn for so long.",
)
@click.option(
    "--renew",
    default=0,
    metavar="PAIRS",
    type=click.IntRange(0),
    help="Start servers anew after so many (default: never).",
)
@click.option("--out", required=True, metavar="DIR", help="Journal, results, logs.")
@click.option("--resume", is_flag=True, help="Go on with the runs in --out.")
@click.option("--trace", is_flag=True, help="Take a kernel trace of each arm first (vLLM).")
@click.option("--routing-log", is_flag=True, help="Log which experts tokens go to, of each arm first (vLLM).")
@click.option(
    "--prefill-pattern",
    default="",
    metavar="N+N|any",
    help="How requests must be prefilled together; by default as in a first run that does not count.",
)
@click.option("--keep-disturbed", is_flag=True, help="Count runs that other processes disturbed.")
@click.option("--one-at-a-time", is_flag=True, help="Never keep two servers up.")
@click.option("--port", type=click.IntRange(1, 65535), help="Of the server; by default a free one.")
@click.option("--start-timeout", default=600.0, show_default=True, metavar="S")
@click.option("--run-timeout", default=600.0, show_default=True, metavar="S")
@click.option("--json", "json_to", metavar="FILE|-", help="Write the summary there.")
@click.option("--quiet", is_flag=True)
def run_command(json_to: str | None, quiet: bool, **options: Any) -> None:
    """Serve a model here and load it, arm by arm: real engine, real client, on loopback.

    Arms take turns in mirrored pairs with the same prompts. Runs that a rule rejects are made again and
    counted. The journal in --out has every finished run; --resume goes on from there.
    """
    from harness.cli.serving.run import run
    from harness.serving.live.client.load import ClientLoad
    from harness.serving.live.run import RunRequest

    keys = {"input_len": "isl", "output_len": "osl", "concurrency": "concurrency", "prompts": "prompts"}
    load = ClientLoad(**{field: options.pop(key) for field, key in keys.items()})
    sys.exit(run(RunRequest(load=load, **options), json_to, quiet))


@serving.command("audit")
@click.argument("names", nargs=-1, metavar="[DOCUMENT|FILE...]")
@click.option("--rules", is_flag=True, help="Only list the rules, each with why it matters.")
@click.option("--notes", is_flag=True, help="Show notes too: what is to be known, and claims that hold.")
@click.option(
    "--fail-on",
    type=click.Choice(["wrong", "suspect", "never"]),
    default="wrong",
    show_default=True,
    help="The mildest finding that makes the exit code 1.",
)
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of text.")
def audit_command(**options: Any) -> None:
    """What does not hold, or is not alike, in published documents (all of them where none is named) or in
    your own results: found by rules over the data. Exit code 1 where something is `wrong` (see --fail-on), 2
    where a name or file cannot be read."""
    from harness.cli.serving.audit import show

    sys.exit(show(**options))


@serving.command("compare")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--metric",
    metavar="NAME[:WHICH]",
    help="`throughput:output`, `tpot:median`, ...; else the throughput, or the first that both have.",
)
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of text.")
def compare_command(**options: Any) -> None:
    """Set one result beside another, if they are alike. A and B: FILE, FILE:ROW, or the id of a published run
    or claim. What can be normalised is (over all GPUs, output tokens alone), and said; else it is refused
    with every reason. Exit code 0 where they compare, 1 where not, 2 where a name is not understood."""
    from harness.cli.serving.compare import show

    sys.exit(show(**options))


@serving.command("recipe")
@click.argument("name", required=False)
@click.option(
    "--part",
    type=click.Choice(["docker", "task", "manifests", "server", "client"]),
    help="Only that part of the recipe.",
)
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead.")
def recipe_command(**options: Any) -> None:
    """A published configuration as a shell script: docker, server and client commands, dstack tasks and
    Kubernetes manifests, as far as its document gives them. What was mended is marked. Without NAME: the
    list."""
    from harness.cli.serving.recipe import show

    sys.exit(show(**options))


@serving.command("trace")
@click.argument("file", metavar="FILE")
@click.option(
    "--phase",
    type=click.Choice(["prefill", "decode", "mixed", "training", "other"]),
    help="Of these steps only.",
)
@click.option("--steps", "each_step", is_flag=True, help="List each step.")
@click.option(
    "--top", type=click.IntRange(min=0), default=15, show_default=True, help="How many kernels to list."
)
@click.option("--partial", is_flag=True, help="Of a file that breaks off, take what there is, and flag it.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write everything there as JSON instead.")
def trace_command(**options: Any) -> None:
    """A trace of torch.profiler or rocprofv3 (JSON, or its kernel trace as CSV; plain or gzip) by op class
    and kernel, prefill and decode steps apart, with what overlaps and what is exposed. Exit code 1 where
    events could not be read or, with --partial, the file breaks off; 2 where it cannot be read."""
    from harness.cli.serving.trace import show

    sys.exit(show(**options))


@serving.command("experiment")
@click.argument("file", metavar="FILE")
@click.option("--out", metavar="DIR", help="Its folder (default: results/experiments/ and its name).")
@click.option("--resume", is_flag=True, help="Go on with what is not done there.")
@click.option("--only", multiple=True, metavar="SWAP", help="Of its swaps only this; may be repeated.")
@click.option("--pairs", type=click.IntRange(2), help="Instead of as many as the file says.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and what is done; run nothing.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write the ledger's rows there.")
@click.option("--quiet", is_flag=True, help="No table and no progress.")
def experiment_command(**options: Any) -> None:
    """What swaps of single kernels change in a live serving run, predicted first: trace, routing log, kernel
    benchmark and replay, the prediction into the ledger, then pairs of runs, then what they show. FILE is
    TOML, or the name of one that comes with the harness (cpu-decode, cpu-default, cpu-long, cpu-short). Exit
    code 1 where a replay missed or a swap has no observation."""
    from harness.cli.serving.experiment import show

    sys.exit(show(**options))


@serving.command("link")
@click.option("--hardware", default="h200", show_default=True, help="The machine, as its tables are named.")
@click.option("--engine", default="sglang", show_default=True)
@click.option("--tp", default=8, show_default=True, help="Tensor parallelism.")
@click.option("--ep", default=1, show_default=True, help="Expert parallelism, 1 or as --tp.")
@click.option("--dp-attention", is_flag=True, help="Refused so far, with the reason.")
@click.option("--isl", default=1024, show_default=True, help="Input tokens of a request, at most.")
@click.option("--osl", default=1024, show_default=True, help="Output tokens of a request, at most.")
@click.option("--concurrency", default="4,8,16,32,64", show_default=True, metavar="N,N...")
@click.option(
    "--range-ratio",
    default=0.8,
    show_default=True,
    help="Lengths are uniform from this times to 1 times; 1: all alike, then requests stay in step.",
)
@click.option(
    "--prefill-tokens", default=8192, show_default=True, help="Of one step: --chunked-prefill-size."
)
@click.option(
    "--waves", default=10, show_default=True, help="Prompts for each place; the first come all at once."
)
@click.option("--tables", metavar="DIR", help="Per-op times in AIConfigurator's files and columns.")
@click.option("--runs", multiple=True, metavar="RUN", help="Runs of this suite: their times come first.")
@click.option("--trace", metavar="FILE", help="A profiler's trace, for what is on the critical path.")
@click.option("--kv-dtype", type=click.Choice(["bf16", "fp8"]), default="bf16", show_default=True)
@click.option(
    "--launch",
    type=click.Choice(["graph", "eager"]),
    default="graph",
    show_default=True,
    help="How decode steps are launched.",
)
@click.option(
    "--what-if",
    multiple=True,
    metavar="OP[:PART]=FACTORx",
    help="mla_decode=2.0x, fused_moe=1.3x(1.2..1.4), block_scale_gemm:qkv_a@decode=saved:5us; all together.",
)
@click.option("--target-tpot", metavar="MS", help="Which speedups it would need: 20ms.")
@click.option("--observed", metavar="BEFORE..AFTER", help="Bounds without a model: 53.19ms..28.37ms.")
@click.option("--validate", is_flag=True, help="Hold the model against what was measured.")
@click.option("--ledger", metavar="FILE", help="Write the predictions of --what-if down there ...")
@click.option("--row", default="", metavar="NAME", help="... under this name; `observe` adds what was seen.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of tables.")
def link_command(**options: Any) -> None:
    """TPOT, TTFT and throughput of DeepSeek-R1 from the times of its kernels, and what a change of a kernel
    is worth, with 90 % intervals. Exit code 1 where --validate finds a mean error over 8 %."""
    from harness.cli.serving.link import show

    sys.exit(show(**options))
