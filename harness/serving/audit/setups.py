"""Rules over how runs were made: commands, images, versions, settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from itertools import combinations

from harness.catalogue.flags import Flag, catalogue
from harness.serving.audit.corpus import Audited, Corpus, new_finding, same_engine, same_hardware
from harness.serving.clients.console.commands import commands
from harness.serving.compare.quantity import matters, option
from harness.serving.published.documents import Configuration
from harness.serving.schema import Finding, OfferedLoad, ServingRun
from kernels import OPS

UNPINNED = re.compile(r":(latest|devel|nightly|main|dev)$|--pre\b|wheels\.vllm\.ai/nightly")
ASKED = (
    "dataset",
    "input_len",
    "output_len",
    "concurrency",
    "request_rate",
    "num_prompts",
    "warmup_s",
    "cooldown_s",
    "prefix_cached",
)
MLA = "attention is MLA"
PROVIDERS = {"triton": "triton", "aiter": "aiter"}
UNNAMED = {"block", "scale", "fused", "decode", "prefill"}  # words of ops' names that do not name an op


def command_and_log_disagree(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A command beside a log that it did not write: one of the two is of another run."""
    for run in audited.runs:
        about = audited.configuration(run.configuration)
        if about is None:
            continue
        for requested in _commands(about, run):
            differ = {
                name: (want, got)
                for name in ASKED
                if (want := getattr(requested, name)) is not None
                and (got := getattr(run.workload, name)) is not None
                and want not in ("", got)
                and got != ""
                and not (name == "concurrency" and about.concurrencies)
            }
            if differ:
                shown = ", ".join(
                    f"{name} {_plain(w)} in the command, {_plain(g)} in the log"
                    for name, (w, g) in differ.items()
                )
                numbers = {
                    f"{k}_{s}": v
                    for k, pair in differ.items()
                    for s, v in zip(("command", "log"), pair, strict=True)
                    if not isinstance(v, str)
                }
                yield new_finding(
                    "command_and_log_disagree", "wrong", f"{run.id}: {shown}", [run.id], **numbers
                )


def _commands(about: Configuration, run: ServingRun) -> list[OfferedLoad]:
    """The client's command of a run: of several the one with its dataset and lengths."""
    ran = run.workload
    requested = [command.workload()[0] for command in commands(about.client.splitlines())]
    loads = requested or ([about.workload] if about.workload != OfferedLoad() else [])
    same = ("dataset", "input_len", "output_len")
    fits = [load for load in loads if all(getattr(load, n) == getattr(ran, n) for n in same)]
    return list(dict.fromkeys(fits))[:1] if len(set(fits)) == 1 else []


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def date_before_image(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """Nobody measures with an image that is built later: the date is wrong, or the image is another."""
    dated = _date(audited.date)
    for about in audited.configurations:
        built = image_date(about.image)
        if dated and built and dated < built:
            days = (built - dated).days
            yield new_finding(
                "date_before_image",
                "wrong",
                f"dated {dated}, but {about.image} is of {built}, {days} days later",
                [about.name],
                days=days,
            )


def image_date(image: str) -> date | None:
    """Of an image's tag: 20251210, or 251212."""
    tag = image.rsplit(":", 1)[-1] if ":" in image else ""
    for digits in re.findall(r"(?<!\d)(?:20)?(2\d[01]\d[0-3]\d)(?!\d)", tag):
        if found_ := _date(f"20{digits[:2]}-{digits[2:4]}-{digits[4:]}"):
            return found_
    return None


def _date(text: str) -> date | None:
    try:
        return date.fromisoformat(text)
    except ValueError:
        return None


def image_not_pinned(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """`latest` and nightly wheels are another engine next week: the run cannot be made again."""
    for about in audited.configurations:
        texts = [
            about.image,
            *(line for line in f"{about.task_file}\n{about.server}".splitlines() if "install" in line),
        ]
        loose = [
            text.strip(" -")
            for text in texts
            if text and (UNPINNED.search(text) or (text == about.image and ":" not in text))
        ]
        if loose:
            yield new_finding(
                "image_not_pinned", "suspect", f"{about.name}: {'; '.join(loose)}", [about.name]
            )


def setups_differ(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """Where the engine's version or options differ between two machines, not only the machine is compared."""
    for a, b in combinations(audited.configurations, 2):
        if not same_engine(a.engine, b.engine) or same_hardware(a.hardware, b.hardware):
            continue
        differ = []
        if a.version != b.version and a.version and b.version:
            differ.append(f"version {a.version} against {b.version}")
        elif a.image != b.image:
            differ.append(f"image {a.image} against {b.image}")
        left, right = ({f for f in setup.flags if matters(f)} for setup in (a, b))
        differ += [
            f"{' '.join(sorted(only))} on {setup.hardware} alone"
            for only, setup in ((left - right, a), (right - left, b))
            if only
        ]
        if differ:
            yield new_finding(
                "setups_differ",
                "suspect",
                f"{a.name}, {b.name}: not only the GPU differs: {'; '.join(differ)}",
                [a.name, b.name],
                differences=len(differ),
            )


def precision_differs(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """DeepSeek-R1's checkpoint is FP8 with a scale a block. Scales a token, or bf16, are other products, of
    another accuracy and speed; figures beside a block-scale server's need that said."""
    for about in audited.configurations:
        texts = (about.task_file, about.server, about.docker, *about.manifests.values())
        precision = option(about.flags, "--quantization") or option(about.flags, "--dtype")
        dtype = re.search(r"--dtype\s+(\w+)", " ".join(texts))
        precision = precision or (dtype[1] if dtype else "")
        if precision and precision != "auto" and "block" not in precision:
            yield new_finding(
                "precision_differs",
                "suspect",
                f"{about.name} asks for {precision}, where the checkpoint is FP8 block-scale",
                [about.name],
            )


def prefix_cache_contradicted(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A run with cached prefixes was not made by a server whose command turns the cache off."""
    for run in audited.runs:
        if run.workload.prefix_cached and "--no-enable-prefix-caching" in run.flags:
            yield new_finding(
                "prefix_cache_contradicted",
                "wrong",
                f"{run.id}: with cached prefixes, but its server has --no-enable-prefix-caching",
                [run.id],
            )


def flag_not_read(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A variable that the version does not read changes nothing, however it is listed; nor does one that the
    model's attention passes over."""
    for about in audited.configurations:
        every = dict(about.environment)
        for role in about.roles.values():
            every |= role.environment
        reasons: dict[str, list[str]] = {}
        for name, value in every.items():
            if (flag := catalogue().get(name)) and (why := unread(flag, about)):
                reasons.setdefault(why, []).append(f"{name}={value}")
        for why, names in reasons.items():
            yield new_finding(
                "flag_not_read",
                "suspect",
                f"{about.name} sets {', '.join(names)}: {why}",
                [about.name],
                flags=len(names),
            )


def unread(flag: Flag, about: Configuration) -> str:
    """Why a configuration's engine takes no notice of a flag; empty where it may."""
    if flag.read == "never":
        known = "alone" not in flag.versions and not re.search(rf"\$\{{?{flag.name}\b", texts_of(about))
        return "read by nothing that was looked at" if known else ""
    if same_engine(flag.library, about.engine):
        until = re.search(r"not in (upstream )?(\d+(?:\.\d+)+)", flag.versions)
        if until and _version(about.version) and _version(about.version) >= _version(until[2]):
            fork = " upstream; a fork may" if until[1] else ""
            return f"{about.engine} {about.version} does not read it{fork}"
        if MLA in flag.without:
            return flag.without
    return ""


def texts_of(about: Configuration) -> str:
    """All that its document gives of it, as one text."""
    return "\n".join((about.docker, about.server, about.client, about.task_file, *about.manifests.values()))


def _version(text: str) -> tuple[int, ...]:
    numbers = re.match(r"v?(\d+(?:\.\d+)+)", text)
    return tuple(int(number) for number in numbers[1].split(".")) if numbers else ()


def statements(audited: Audited) -> Iterator[tuple[str, str, Configuration]]:
    """(id, quoted text, the configuration that it is of): claims, and what a configuration's notes quote."""
    for claim in audited.claims:
        about = audited.configuration(claim.configuration)
        if about or len(audited.configurations) == 1:
            yield claim.id, claim.quote, about or audited.configurations[0]
    for about in audited.configurations:
        for note in about.notes:
            for quote in re.findall(r'"([^"]+)"', note):
                yield about.name, quote, about


def notes_against_settings(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A flag that is set and a log that names another kernel: set does not mean in effect."""
    for subject, quote, about in statements(audited):
        named = [p for word, p in PROVIDERS.items() if re.search(rf"\b{word}\b", quote.lower())]
        ops = named_ops(quote)
        if len(named) != 1 or len(ops) != 1:
            continue
        for name, value in about.environment.items():
            meant = catalogue()[name].stands_for(value, ops[0]) if name in catalogue() else ()
            if meant and not any(named[0] in text for text in meant):
                yield new_finding(
                    "notes_against_settings",
                    "suspect",
                    f'{subject}: "{quote}", where {name}={value} stands for {", ".join(meant)}',
                    [subject],
                )


def named_ops(text: str) -> list[str]:
    """The suite's ops that a text speaks of, by the words of their names."""
    words = set(re.findall(r"\w+", text.lower())) - UNNAMED
    return [op for op in OPS if words & set(op.split("_"))]


def advised_without_effect(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """Advice to set what the engine does not read for this model costs its reader a restart and a run."""
    texts = [(claim.id, claim.quote) for claim in audited.claims]
    texts += [(about.name, note) for about in audited.configurations for note in about.notes]
    for subject, text in texts:
        for name, value in re.findall(r"\b([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)=(\w+)", text):
            for about in audited.configurations:
                why = unread(catalogue()[name], about) if name in catalogue() else ""
                if why and about.environment.get(name) != value:
                    yield new_finding(
                        "advised_without_effect",
                        "suspect",
                        f"{subject} advises {name}={value}: {why}",
                        [subject],
                    )
                    break


def prefix_cache_on(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """Runs of a sweep that draw the same prompts from one seed find those of the run before in a prefix cache
    that is on: what is labelled as not cached may be."""
    for about in audited.configurations:
        if "--enable-prefix-caching" not in about.flags:
            continue
        rows = [
            run
            for run in corpus.all_rows
            if run.workload.prefix_cached is False
            and run.workload.dataset == "random"
            and same_hardware(run.hardware, about.hardware)
            and same_engine(run.engine, about.engine)
            and run.version == about.version
        ]
        if rows:
            yield new_finding(
                "prefix_cache_on",
                "suspect",
                f"{about.name} serves with --enable-prefix-caching; {len(rows)} runs of it count as "
                "not cached, on random prompts that a repeated seed would repeat",
                [about.name],
                runs=len(rows),
            )


RULES = (
    command_and_log_disagree,
    date_before_image,
    image_not_pinned,
    setups_differ,
    precision_differs,
    prefix_cache_contradicted,
    flag_not_read,
    notes_against_settings,
    advised_without_effect,
    prefix_cache_on,
)
