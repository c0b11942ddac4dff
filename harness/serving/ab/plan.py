"""The plan of an A/B: its arms, how the server starts, how the client calls it, and their commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo

from harness.errors import NothingRan, UsageError, mistake
from harness.plan.budget import parse_seconds
from harness.plan.settings import UNSET
from harness.serving.schema import StrictRecord

# The metrics of an A/B, each with name, statistic and kind of tokens in a client's run.
METRICS: dict[str, tuple[str, ...]] = {"tpot": ("tpot", "mean"), "ttft": ("ttft", "mean")}
METRICS |= {"ttft_median": ("ttft", "median"), "throughput": ("throughput", "", "output")}
CONTAINERS = ("docker", "podman", "nerdctl")
FOREIGN = (*CONTAINERS, "srun", "enroot", "sudo", "ssh")  # what they start is not a child of theirs
SHELLS = ("sh", "bash")
NOWHERE = Path(os.devnull)
"""The folder and the file of a command that is only looked at. Its Python runs with its variables (see
ab/names.py), which may name a folder below this one: nothing can be written there."""
VARIABLE = re.compile(r"[A-Za-z_]\w*")
PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
# A word that only a shell understands: an operator, a redirection, a `;` at its end, a variable, a command.
OF_A_SHELL = re.compile(r"&&?|\|\|?|;|[12]?>+(&1)?|<|.*;|.*(\$[\w({]|`).*", re.DOTALL)


def _variables(values: dict[str, str]) -> dict[str, str]:
    if wrong := [name for name in values if not VARIABLE.fullmatch(name)]:
        raise ValueError(f"{wrong[0]!r} is no environment variable")
    return values


def _seconds(value: object, key: ValidationInfo) -> object:
    return parse_seconds(value, str(key.field_name)) if isinstance(value, str) else value


Value = Annotated[str, Field(coerce_numbers_to_str=True)]
Environment = Annotated[dict[str, Value], AfterValidator(_variables)]
"""Variables. The value `unset` removes one."""
Flags = Annotated[str, AfterValidator(lambda text: shlex.join(shlex.split(text.replace("\\\n", " "))))]
Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0)]


class Arm(StrictRecord):
    """What an arm changes: variables of the server, flags of its command, and the image for {image}."""

    env: Environment = Field(default_factory=dict)
    flags: Flags = ""
    image: str = ""


class Plan(StrictRecord):
    """One experiment, as its TOML file has it (docs/serving-ab.md).

    launch, client, stop and warm_up are commands; no shell runs them. Placeholders in braces are filled in.
    """

    launch: str
    client: str
    arms: dict[str, Arm] = Field(min_length=2)  # the first is compared with the others
    env: Environment = Field(default_factory=dict)  # variables of all arms
    image: str = ""
    prompts: int | None = Field(default=None, gt=0)
    warm_up_prompts: int | None = Field(default=None, gt=0)
    warm_up: str = ""  # by default the client's command, with warm_up_prompts
    ready: str = Field(default="/health", pattern="^/")  # a path that answers 200 once the server serves
    flush: str = Field(default="", pattern="^(/|$)")  # a path to POST to before a measured run
    stop: str = ""
    port: int = Field(default=30000, ge=1024, le=63000)  # the first that is tried; each launch takes another
    metric: Literal["tpot", "ttft", "ttft_median", "throughput"] = "tpot"
    margin: float = Field(default=1.0, gt=0, lt=50)  # the least effect, in per cent, that matters
    pairs: int | None = Field(default=None, ge=1)
    """The number of pairs, judged when all are there; None: at most 12, judged after 4, 6, 8 and 12."""
    seed: int = Field(default=1, ge=0, lt=2**31)
    launch_minutes: float = Field(default=10.0, gt=0)  # expected of a launch, until the first are measured
    run_minutes: float = Field(default=8.0, gt=0)  # the same of a run
    first_ready_timeout: Seconds = 3600.0
    ready_timeout: Seconds = 1800.0
    client_timeout: Seconds = 3600.0
    stop_timeout: Seconds = 90.0

    @property
    def base(self) -> str:
        return next(iter(self.arms))

    @property
    def others(self) -> list[str]:
        return list(self.arms)[1:]

    @property
    def concurrency(self) -> int | None:
        return self.of_client(r"--(?:max-|request-)?concurrency")

    @property
    def prompts_asked(self) -> int | None:
        """The number of requests of a measured run by the plan, for clients whose file does not say it."""
        return self.prompts or self.of_client(r"--num-prompts?|--num-requests|--request-count")

    def of_client(self, option: str) -> int | None:
        """A number in the client's command; None if it is there twice, or not at all."""
        numbers = re.findall(rf"(?:{option})[ =]+(\d+)", self.client)
        return int(numbers[0]) if len(numbers) == 1 else None

    def order(self, pair: int) -> list[str]:
        """The arms in mirrored order (AB, BA, AB ...), so that a drift of the machine affects them equally.
        Pair 0 is launched in their own order."""
        arms = list(self.arms)
        return arms[::-1] if pair > 0 and pair % 2 == 0 else arms

    def for_warm_up(self) -> Plan:
        """The plan with the client that warms the server up, and with the number of its prompts."""
        prompts = self.warm_up_prompts or self.prompts
        return self.model_copy(update={"client": self.warm_up or self.client, "prompts": prompts})

    def variables(self, arm: str) -> dict[str, str]:
        return {**self.env, **self.arms[arm].env}

    def changes(self, arm: str) -> tuple[dict[str, str], list[str], str]:
        """The arm's variables, flags and image, by which its launch may differ from that of another arm."""
        return self.variables(arm), shlex.split(self.arms[arm].flags), self.arms[arm].image or self.image

    def differing(self) -> tuple[list[str], list[str]]:
        """The names of variables and of flags that differ between arms."""
        # A flag with all words up to the next flag.
        flag = re.compile(r"(?:^|\s)(--?[\w.-]+)(.*?)(?=\s--?[a-zA-Z]|$)")
        variables = [list(self.variables(arm).items()) for arm in self.arms]
        return _unlike(variables), _unlike([flag.findall(arm.flags) for arm in self.arms.values()])


def _unlike(arms: Sequence[Sequence[tuple[str, str]]]) -> list[str]:
    """The names that do not have the same value in all arms, each of which is a list of (name, value)."""
    pairs = [pair for arm in arms for pair in arm]
    return list(dict.fromkeys(pair[0] for pair in pairs if not all(pair in arm for arm in arms)))


@dataclass(frozen=True)
class Command:
    """The words that start a process, and its changes of the environment; None removes a variable."""

    words: tuple[str, ...]
    variables: Mapping[str, str | None] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        values = {**os.environ, **self.variables}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        """The command as one types it into a shell."""
        removed = [f"-u {name}" for name, value in self.variables.items() if value is None]
        words = ["env", *removed] if removed else []
        for name, value in self.variables.items():
            if value is not None:
                words.append(f"{name}={shlex.quote(value)}")
        return " ".join([*words, shlex.join(self.words)])


def read_plan(values: Mapping[str, object], where: str) -> Plan:
    """A plan whose commands can be filled in. Raises UsageError."""
    try:
        plan = Plan.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"cannot read {where}: {mistake(error)}") from None
    _examine(plan)
    return plan


def _examine(plan: Plan) -> None:
    """Raises UsageError for a mistake that would only show later, as a failure or a wrong measurement. No
    command is run here, so the placeholders in commands have any values."""
    if "{port}" not in plan.launch:
        raise UsageError("no {port} in the launch command: each launch takes another port")
    if "{url}" not in plan.client and "{port}" not in plan.client:
        raise UsageError("no {url} in the client command: it would call another server")
    if "{result}" not in plan.client:
        raise UsageError("no {result} in the client command: the file that it writes, as JSON or JSONL")
    if "{seed}" not in plan.client:
        raise UsageError("no {seed} in the client command: each pair sends other prompts, both arms the same")
    if "{prompts}" in plan.client and plan.prompts is None:
        raise UsageError("{prompts} stands in the client command: say how many with `prompts`")
    client_command(plan.for_warm_up(), plan.base)  # raises UsageError for what cannot be filled in
    for arm, changes in plan.arms.items():
        if not re.fullmatch(r"[\w+-][\w.+-]*", arm):
            raise UsageError(f"an arm is named with letters, digits and .+-_ only, not {arm!r}")
        words = launch_command(plan, arm).words
        programs = [Path(word).name for word in words[:4]]  # also behind sudo, or env A=1
        docker = next((name for name in programs if name in CONTAINERS), "")
        if docker and not plan.stop:
            raise UsageError(
                f"{docker} does not end its container when it is ended itself: give the launch "
                f'`--name {{name}}` and the plan stop = "{docker} stop -t 90 {{name}}"'
            )
        if docker and plan.variables(arm) and "{env}" not in plan.launch:
            raise UsageError(f"variables do not reach the container: write {{env}} after `{docker} run`")
        has_script = any(re.fullmatch("-[a-z]*c", word) for word in words)  # as `bash -lc SCRIPT`
        in_shell = has_script and any(name in SHELLS for name in programs)
        if in_shell and changes.flags and "{flags}" not in plan.launch:
            raise UsageError("flags at the end would go to the shell: write {flags} where they belong")
        if changes.image and "{image}" not in plan.launch:
            raise UsageError(f"arm {arm} has an image, and no {{image}} stands in the launch command")
        if plan.stop:
            stop_command(plan, arm)  # raises UsageError for what cannot be filled in


def launch_command(plan: Plan, arm: str, name: str = "name", port: int = 0, cache: Path = NOWHERE) -> Command:
    """The command that starts the server of an arm. Its flags come at {flags}, or at the end."""
    env, flags, image = plan.changes(arm)
    values = {**_values(arm, port, cache), "name": name, "image": image}
    variables = {key: None if value == UNSET else _filled(value, values) for key, value in env.items()}
    for_docker: list[str] = []
    for key, value in variables.items():
        if value is not None:
            for_docker += ["-e", f"{key}={value}"]
    lists = {"env": for_docker, "flags": [_filled(word, values) for word in flags]}
    text = plan.launch if "{flags}" in plan.launch else f"{plan.launch}\n{{flags}}"
    command = _command(text, "launch", {**values, **lists})
    return Command(command.words, {**command.variables, **variables})


def client_command(
    plan: Plan, arm: str, port: int = 0, seed: int = 0, result: Path = NOWHERE, cache: Path = NOWHERE
) -> Command:
    """The command that calls the server."""
    values = {"seed": str(seed), "result": str(result), "prompts": str(plan.prompts)}
    return _command(plan.client, "client", {**_values(arm, port, cache), **values})


def stop_command(plan: Plan, arm: str, name: str = "name", port: int = 0) -> Command:
    return _command(plan.stop, "stop", {**_values(arm, port, NOWHERE), "name": name})


def require_programs(plan: Plan) -> None:
    """Raises NothingRan if a command's program is missing here, before anything is started."""
    commands = {"launch": launch_command(plan, plan.base), "client": client_command(plan, plan.base)}
    for what, command in commands.items():
        if shutil.which(command.words[0]) is None:
            raise NothingRan(f"{what}: there is no program {command.words[0]} here")


def _values(arm: str, port: int, cache: Path) -> dict[str, str]:
    """What the placeholders stand for that all commands have."""
    return {"port": str(port), "url": f"http://127.0.0.1:{port}", "arm": arm, "cache": str(cache)}


def _filled(text: str, values: Mapping[str, str]) -> str:
    """The text with its placeholders filled in. A path that exists becomes absolute: commands do not run in
    this folder, because its `kernels` and `tests` could hide an engine's modules."""
    word = PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    is_path = os.sep in value or Path(value).suffix in (".sh", ".py", ".yaml", ".yml", ".json")
    return f"{option}{equals}{Path(value).absolute()}" if is_path and Path(value).exists() else word


def _command(text: str, what: str, values: Mapping[str, str | list[str]]) -> Command:
    """Splits the text as a shell does; `A=1` in front sets a variable. Raises UsageError. what: its name in
    messages; values: what each placeholder stands for, where a list is several words, or none"""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UsageError(f"cannot read the {what} command: {error}") from None
    texts = {name: value if isinstance(value, str) else shlex.join(value) for name, value in values.items()}
    if unknown := [name for name in PLACEHOLDER.findall(text) if name not in texts]:
        known = " ".join(f"{{{name}}}" for name in texts)
        raise UsageError(f"the {what} command has no {{{unknown[0]}}} to fill in; there are: {known}")
    variables: dict[str, str | None] = {}
    if words[:1] == ["env"] and words[1:] and re.match(r"[A-Za-z_]\w*=", words[1]):
        words = words[1:]  # variables that `env` sets would take precedence over those of an arm
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = _filled(value, texts)
    in_shell = bool(words) and Path(words[0]).name in SHELLS
    filled: list[str] = []
    for word in words:
        if not in_shell and OF_A_SHELL.fullmatch(word):
            raise UsageError(
                f"no shell runs the {what} command, so {word!r} would reach it as it stands: write the "
                "value, or put the command into a script that ends with exec"
            )
        placeholder = PLACEHOLDER.fullmatch(word)
        several = values.get(placeholder[1]) if placeholder else None
        if isinstance(several, list):
            filled += several
        else:
            filled.append(_filled(word, texts))
    if not filled:
        raise UsageError(f"the {what} command is empty")
    if program := shutil.which(filled[0]):
        filled[0] = str(Path(program).absolute())
    return Command(tuple(filled), variables)
