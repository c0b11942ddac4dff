"""Plan of an A/B: how the server starts, how the client calls it, the arms, and the commands that follow."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from harness.errors import NothingRan, UsageError, mistake
from harness.files import JsonObject
from harness.plan.arms import UNSET
from harness.plan.budget import parse_seconds
from harness.serving.schema import StrictRecord

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

METRICS = ("tpot", "ttft", "ttft_median", "throughput")
OF_LAUNCH = ("port", "url", "arm", "image", "name", "cache", "env", "flags")
OF_CLIENT = ("port", "url", "arm", "seed", "result", "prompts", "cache")
OF_STOP = ("name", "port", "arm")
CONTAINERS = ("docker", "podman", "nerdctl")
VARIABLE = re.compile(r"[A-Za-z_]\w*")
PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
SHELL = {"&&", "||", "|", ";", "&", ">", ">>", "<", "2>&1", "2>"}
STARTS = re.compile(r"launch_server|vllm serve|api_server|trtllm-serve|openai_server|sglang serve")
CALLS = re.compile(
    r"bench_serving|bench serve|benchmark_serving|benchmark_client|trtllm-bench|genai-perf|aiperf"
)


def _variables(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not VARIABLE.fullmatch(name) or "\0" in value:
            raise ValueError(f"{name!r} is no environment variable")
    return values


def _seconds(text: str) -> str:
    try:
        return f"{parse_seconds(text, 'the time'):g}s"
    except UsageError as error:
        raise ValueError(str(error)) from None


Environment = Annotated[dict[str, str], AfterValidator(_variables)]
"""Variables; the value `unset` takes one away."""
Seconds = Annotated[str, AfterValidator(_seconds)]


class Arm(StrictRecord):
    """What an arm changes: variables of the server, flags of its command, the image that {image} stands for."""

    env: Environment = Field(default_factory=dict)
    flags: str = ""
    image: str = ""


class Plan(StrictRecord):
    """One experiment, as its TOML file has it.

    launch, client:  commands; no shell runs them. What stands in braces is filled in: {port}, {url}, {arm},
                     {cache} (a folder of the arm, kept between its launches); of the launch also {name}
                     (unique), {image}, {env} (`-e A=1 ...`), {flags} (else the arm's flags stand at the end);
                     of the client {seed}, {result} (the file that it writes) and {prompts}
    arms:            the first is what the others are held against
    env:             variables of all arms
    prompts, warm_up_prompts: what {prompts} stands for, in a measured run and before it
    warm_up:         another command to warm the server up; else the client's, with another seed
    ready, flush:    paths: one that answers 200 once it serves, one to POST to before a measured run
    stop:            a command that ends the server, where SIGTERM to the launch command does not
    port:            the first one tried; each launch takes another
    metric, margin:  what decides, and how many per cent of it are worth deciding
    pairs:           so many, looked at once; None: at most 12, looked at after 4, 6, 8 and 12
    launch_minutes, run_minutes: expected, until the first launches have shown it
    """

    launch: str
    client: str
    arms: dict[str, Arm] = Field(min_length=2)
    env: Environment = Field(default_factory=dict)
    image: str = ""
    prompts: int | None = Field(default=None, gt=0)
    warm_up_prompts: int | None = Field(default=None, gt=0)
    warm_up: str = ""
    ready: str = "/health"
    flush: str = ""
    stop: str = ""
    port: int = Field(default=30000, ge=1024, le=63000)
    metric: Literal["tpot", "ttft", "ttft_median", "throughput"] = "tpot"
    margin: float = Field(default=1.0, gt=0, lt=50)
    pairs: int | None = Field(default=None, ge=1)
    seed: int = Field(default=1, ge=0, lt=2**31)
    launch_minutes: float = Field(default=10.0, gt=0)
    run_minutes: float = Field(default=8.0, gt=0)
    first_ready_timeout: Seconds = "3600s"
    ready_timeout: Seconds = "1800s"
    client_timeout: Seconds = "3600s"
    stop_timeout: Seconds = "90s"

    @property
    def base(self) -> str:
        return next(iter(self.arms))

    @property
    def others(self) -> list[str]:
        return list(self.arms)[1:]

    def seconds(self, name: str) -> float:
        return parse_seconds(getattr(self, name), name)

    def variables(self, arm: str) -> dict[str, str]:
        return {**self.env, **self.arms[arm].env}

    def changes(self, arm: str) -> tuple[dict[str, str], list[str], str]:
        """What its launch has of its own, in a form that can be compared."""
        return self.variables(arm), shlex.split(self.arms[arm].flags), self.arms[arm].image or self.image

    @property
    def concurrency(self) -> int | None:
        """As the client's command has it."""
        found = re.search(r"--(?:max-|request-)?concurrency[ =]+(\d+)", self.client)
        return int(found[1]) if found else None

    def differing(self) -> tuple[list[str], list[str]]:
        """Names of variables, and of flags, that not all arms have alike."""
        environments = [self.variables(arm) for arm in self.arms]
        flags = [_flags(arm.flags) for arm in self.arms.values()]
        names = dict.fromkeys(name for each in environments for name in each)
        options = dict.fromkeys(word.partition("=")[0] for each in flags for word in each if word[:1] == "-")
        return (
            [n for n in names if len({json.dumps(e.get(n)) for e in environments}) > 1],
            [o for o in options if len({tuple(_values(each, o)) for each in flags}) > 1],
        )


def _flags(text: str) -> list[str]:
    return shlex.split(text)


def _values(words: Sequence[str], option: str) -> list[str]:
    """What stands behind an option, wherever it stands."""
    found = []
    for i, word in enumerate(words):
        if word.partition("=")[0] == option:
            following = words[i + 1 : i + 2]
            found.append(word + " ".join(w for w in following if not w.startswith("--")))
    return found


@dataclass(frozen=True)
class Command:
    """Words that start a process, and what they change in the environment; None: a variable taken away."""

    words: tuple[str, ...]
    variables: Mapping[str, str | None] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        changed = {**os.environ, **self.variables}
        return {name: value for name, value in changed.items() if value is not None}

    def __str__(self) -> str:
        """For a shell."""
        sets = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items() if value is not None]
        unset = [f"-u {name}" for name, value in self.variables.items() if value is None]
        prefix = ["env", *unset] if unset else []
        return " ".join([*prefix, *sets, shlex.join(self.words)])


def read_plan(path: str) -> JsonObject:
    """What a TOML file says. Raises UsageError."""
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def made(values: Mapping[str, object], where: str) -> Plan:
    """A plan whose commands can be filled in. Raises UsageError."""
    try:
        plan = Plan.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"cannot read {where}: {mistake(error)}") from None
    examine(plan)
    return plan


def parse_arm(text: str) -> tuple[str, dict[str, object]]:
    """`NAME: A=1 --flag value image=TAG`; `A=unset` takes a variable away. Raises UsageError."""
    name, _, rest = text.partition(":")
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise UsageError(f"cannot read --arm {text!r}: {error}") from None
    env, flags, image = {}, [], ""
    for word in words:
        key, equals, value = word.partition("=")
        if not flags and equals and VARIABLE.fullmatch(key):
            if key == "image":
                image = value
            else:
                env[key] = value
        else:
            flags.append(word)
    if flags and not flags[0].startswith("-"):
        raise UsageError(f"--arm {text!r}: {flags[0]!r} is no A=1, no --flag and no image=TAG")
    return name.strip(), {"env": env, "flags": shlex.join(flags), "image": image}


def examine(plan: Plan) -> None:
    """Raises UsageError for what could only fail, or measure something else, later."""
    for arm, changes in plan.arms.items():
        if not re.fullmatch(r"[\w.+-]+", arm):
            raise UsageError(f"an arm is named with letters, digits and .+-_ only, not {arm!r}")
        words = launch(plan, arm, "a-name", plan.port, Path("/cache")).words
        program = Path(words[0]).name
        if program in CONTAINERS and not plan.stop:
            raise UsageError(
                f"{program} does not end its container when it is ended itself: give the launch "
                f'`--name {{name}}` and the plan stop = "{program} stop -t 90 {{name}}"'
            )
        if program in CONTAINERS and plan.variables(arm) and "{env}" not in plan.launch:
            raise UsageError(f"variables do not reach the container: write {{env}} after `{program} run`")
        if program in ("sh", "bash") and "-c" in words and changes.flags and "{flags}" not in plan.launch:
            raise UsageError("flags at the end would go to the shell: write {flags} where they belong")
        if changes.image and "{image}" not in plan.launch:
            raise UsageError(f"arm {arm} has an image, and no {{image}} stands in the launch command")
        for script in (Path(word) for word in words if word.endswith(".sh")):
            text = script.read_text(errors="replace") if script.is_file() else ""
            if STARTS.search(text) and CALLS.search(text):
                raise UsageError(
                    f"{script} starts the server and calls it, too: make two scripts of it, one that ends "
                    'with `exec` and the server\'s command with --port "$1", for launch = "bash server.sh '
                    '{port}", and one with the client\'s, for client = "bash client.sh {url} {seed} {result}"'
                )
    if "{port}" not in plan.launch and not any("{port}" in value for value in plan.env.values()):
        raise UsageError("no {port} in the launch command: each launch takes another port")
    if "{url}" not in plan.client and "{port}" not in plan.client:
        raise UsageError("no {url} and no {port} in the client command: it would call another server")
    if "{result}" not in plan.client:
        raise UsageError("no {result} in the client command: the file that it writes, as JSON or JSONL")
    if "{seed}" not in plan.client:
        raise UsageError("no {seed} in the client command: each pair sends other prompts, both arms the same")
    if "{prompts}" in plan.client and plan.prompts is None:
        raise UsageError("{prompts} stands in the client command: say how many with `prompts`")
    client(plan, plan.base, plan.port, 1, Path("/result"), Path("/cache"), warm_up=True)
    for arm in plan.arms:
        if plan.stop:
            stop(plan, arm, "a-name", plan.port)


def launch(plan: Plan, arm: str, name: str, port: int, cache: Path) -> Command:
    """What starts the server of an arm."""
    changes = plan.arms[arm]
    values = _values_of(plan, arm, port, cache) | {"name": name}
    variables = {key: _filled(value, values) for key, value in plan.variables(arm).items()}
    flags = [_filled(word, values) for word in _flags(changes.flags)]
    env = [word for key, value in variables.items() if value != UNSET for word in ("-e", f"{key}={value}")]
    lists = {"env": env, "flags": flags}
    command = _command(plan.launch, values, OF_LAUNCH, "launch", lists)
    own = {key: None if value == UNSET else value for key, value in variables.items()}
    words = command.words if "{flags}" in plan.launch else (*command.words, *flags)
    return Command(words, {**command.variables, **own})


def client(
    plan: Plan, arm: str, port: int, seed: int, result: Path, cache: Path, *, warm_up: bool = False
) -> Command:
    """What calls it; the warming call may have its own command, or fewer prompts."""
    prompts = (plan.warm_up_prompts if warm_up else None) or plan.prompts
    values = _values_of(plan, arm, port, cache)
    values |= {"seed": str(seed), "result": str(result), "prompts": str(prompts)}
    text = plan.warm_up if warm_up and plan.warm_up else plan.client
    return _command(text, values, OF_CLIENT, "client")


def stop(plan: Plan, arm: str, name: str, port: int) -> Command:
    values = {"name": name, "port": str(port), "arm": arm}
    return _command(plan.stop, values, OF_STOP, "stop")


def require_programs(plan: Plan) -> None:
    """Raises NothingRan where a command's program is missing here: before anything is started."""
    first = launch(plan, plan.base, "a-name", plan.port, Path("/cache"))
    calls = client(plan, plan.base, plan.port, 1, Path("/result"), Path("/cache"))
    for what, command in (("launch", first), ("client", calls)):
        if shutil.which(command.words[0]) is None:
            raise NothingRan(f"{what}: there is no program {command.words[0]} here")


def _values_of(plan: Plan, arm: str, port: int, cache: Path) -> dict[str, str]:
    image = plan.arms[arm].image or plan.image
    url = f"http://127.0.0.1:{port}"
    return {"port": str(port), "url": url, "arm": arm, "cache": str(cache), "image": image}


def _filled(text: str, values: Mapping[str, str]) -> str:
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)


def _command(
    text: str,
    values: Mapping[str, str],
    known: Sequence[str],
    what: str,
    lists: Mapping[str, Sequence[str]] = {},
) -> Command:
    """Words as a shell would have them, `A=1` in front as variables, files by their whole path: a command
    runs in a folder of its own. Raises UsageError."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UsageError(f"cannot read the {what} command: {error}") from None
    if unknown := [name for name in PLACEHOLDER.findall(text) if name not in known]:
        there = " ".join(f"{{{name}}}" for name in known)
        raise UsageError(f"the {what} command has no {{{unknown[0]}}} to fill in; there are: {there}")
    variables: dict[str, str | None] = {}
    while words and (match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
        variables[match[1]] = _filled(match[2], values)
        words.pop(0)
    if not words:
        raise UsageError(f"the {what} command is empty")
    in_shell = Path(words[0]).name in ("sh", "bash")
    filled: list[str] = []
    for word in words:
        if not in_shell and (word in SHELL or word.endswith(";") or re.search(r"\$[\w({]|`", word)):
            raise UsageError(
                f"no shell runs the {what} command, so {word!r} would reach it as it stands: write the value, "
                "or put the command into a script that ends with exec"
            )
        if (key := word.strip("{}")) in lists and word == f"{{{key}}}":
            filled += lists[key]
        else:
            joined = {key: shlex.join(each) for key, each in lists.items()}
            filled.append(_whole_path(_filled(word, {**values, **joined})))
    program = shutil.which(filled[0])
    return Command((str(Path(program).absolute()) if program else filled[0], *filled[1:]), variables)


def _whole_path(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    path = Path(value)
    is_file = (os.sep in value or path.suffix in (".sh", ".py", ".yaml", ".yml", ".json")) and path.exists()
    return f"{option}{equals}{path.absolute()}" if is_file and not path.is_absolute() else word
