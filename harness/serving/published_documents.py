"""Published serving results as data: what a document ran, measured and claims.

There is one JSON file for each document in `results/published/serving`. If the document leaves the scope or
tokens of a metric open, they are `unknown`, and its `label` has the document's words.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from harness.catalogue import published, recipes
from harness.files import JsonObject
from harness.paths import PUBLISHED
from harness.serving.schema import Mode, OfferedLoad, Parallelism, ServingRun, StrictRecord

FOLDER = PUBLISHED / "serving"
WIDTH = 110
Text = Annotated[str, BeforeValidator(lambda text: "\n".join(text) if isinstance(text, list) else text)]
"""A text of several lines; in a file it may be a list of them."""


class Correction(StrictRecord):
    """A change of a documented text, so that it runs elsewhere."""

    part: str  # `docker`, `server`, `client`, `task`, or the file name of a manifest
    old: Text  # a part of that text
    new: Text | None = None  # replaces it everywhere; None: `why` is only a note
    why: str  # one line for the reader


class RecipeVariable(StrictRecord):
    """A shell variable of a recipe. says: what its user sets it to"""

    name: str
    value: str
    says: str


class Role(StrictRecord):
    """One of several servers of a configuration, as `prefill`: its own settings, beside the shared ones."""

    instances: int = 1
    gpus: int | None = None
    nodes: int | None = None
    flags: tuple[str, ...] = ()


class Configuration(StrictRecord):
    """What a document ran. Its texts are the document's, word for word; `mends` and `settings` are this
    project's. docker, server and client are shell commands, empty if the document gives none."""

    name: str
    document: str = ""
    where: str = ""
    hardware: str
    gpus: int | None = None
    nodes: int | None = None
    engine: str
    version: str = ""
    image: str = ""
    mode: Mode = "unknown"
    flags: tuple[str, ...] = ()  # the server's, one string each; from its command if the file gives none
    environments: dict[str, str] = Field(default_factory=dict)
    """Names in harness/catalogue/recipes.json, by role, which is empty for one server."""
    environment: dict[str, str] = Field(default_factory=dict)  # what these share; filled in when loaded
    parallelism: Parallelism = Parallelism()
    roles: dict[str, Role] = Field(default_factory=dict)
    workload: OfferedLoad = OfferedLoad()
    concurrencies: tuple[int, ...] = ()  # of the runs that the client's loop makes
    docker: Text = ""
    server: Text = ""  # empty, too, if the docker command or the task file starts it
    client: Text = ""
    client_source: str = ""  # the source of the client's commands, if that is not the document
    task_file: Text = ""  # a dstack task
    manifests: dict[str, Text] = Field(default_factory=dict)  # Kubernetes and Helm files, by name
    versions: tuple[str, ...] = ()  # of what else is installed
    settings: tuple[RecipeVariable, ...] = ()
    mends: tuple[Correction, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def serving(self) -> str:
        """The command that starts the server, from wherever the document has it; empty with manifests."""
        after_image = self.docker.partition(self.image)[2] if self.image else ""
        return self.server or commands_of(self.task_file) or after_image


class PublishedDocument(StrictRecord):
    """A document. sha256: of the text that was read"""

    id: str
    title: str
    publisher: str
    date: str = ""
    url: str = ""
    sha256: str
    notes: tuple[str, ...] = ()
    configurations: tuple[Configuration, ...] = ()
    runs: tuple[ServingRun, ...] = ()
    claims: tuple[JsonObject, ...] = ()


def documents(folder: Path = FOLDER) -> list[PublishedDocument]:
    """The documents of a folder, in the order of their files."""
    return [_document(path) for path in sorted(folder.glob("*.json"))]


def configurations() -> dict[str, Configuration]:
    """All documents' configurations, by name."""
    return {setup.name: setup for document in documents() for setup in document.configurations}


def _document(path: Path) -> PublishedDocument:
    raw = published.read(path)
    setups = [_configuration(setup | {"document": raw["id"]}) for setup in raw.get("configurations", ())]
    # From the name of a configuration (empty: a run names none) to the fields that its runs take from it.
    shared: dict[str, JsonObject] = {"": {}, **{setup.name: _of_runs(setup) for setup in setups}}
    runs = [ServingRun(**shared[run.get("configuration", "")] | run) for run in raw.get("runs", ())]
    return PublishedDocument(**raw | {"configurations": tuple(setups), "runs": tuple(runs)})


def _configuration(raw: JsonObject) -> Configuration:
    """A configuration, with what its environments have in common, and with flags."""
    setup = Configuration(**raw)
    environments = [recipes.find(name).environment for name in setup.environments.values()]
    common = dict(environments[0]) if environments else {}
    for environment in environments:
        common = {name: value for name, value in common.items() if environment.get(name) == value}
    return setup.model_copy(update={"environment": common, "flags": setup.flags or flags_of(setup.serving)})


def _of_runs(setup: Configuration) -> JsonObject:
    """The fields that runs of a configuration take from it."""
    names = ("hardware", "gpus", "nodes", "engine", "version", "image", "environment", "mode", "parallelism")
    flags = [f"{name}: {flag}" for name, role in setup.roles.items() for flag in role.flags]
    return {name: getattr(setup, name) for name in names} | {"flags": (*setup.flags, *dict.fromkeys(flags))}


def flags_of(command: str) -> tuple[str, ...]:
    """The options of the last command of a script, each with its value: `--tp 8`."""
    flags: list[str] = []
    lines = command.replace("\\\n", " ").strip().splitlines() or [""]
    for word in shlex.split(lines[-1], comments=True):
        if word.startswith("--"):
            flags.append(word)
        elif flags and word != "&" and " " not in flags[-1]:
            flags[-1] += f" {word}"
    return tuple(flags)


def commands_of(task: str) -> str:
    """The commands of a dstack task as a shell script, in which lines that YAML folds are joined."""
    commands: list[str] = []
    for line in task.partition("\ncommands:\n")[2].splitlines():
        if not line.startswith(" "):
            break
        if line.lstrip().startswith("- "):
            commands.append(line.lstrip()[2:].strip())
        else:
            commands[-1] += f" \\\n    {line.strip()}"
    return "\n".join(commands)


# Recipes: the texts of a configuration as a shell script, ready for a user's own machine. A text stays as the
# document has it, except for the configuration's `mends`, each of which is named above its text.


def script(setup: Configuration, gone: Mapping[str, str]) -> str:
    """The texts that the document gives, in the order in which they are used, as a shell script. gone: from
    flags and variables that current engines no longer have to what replaces them, or an empty text; a comment
    above a text names those that are in it"""
    heading = [
        f"{setup.name}: {setup.gpus} x {setup.hardware}, {setup.engine} {setup.version}".rstrip(),
        f"document: {setup.document}, {setup.where}",
        f"image: {setup.image}",
        "Verbatim from the document but for what is marked `mended`.",
    ]
    about = dict.fromkeys(recipes.find(name).note for name in setup.environments.values())
    lines = _comments([*heading, *setup.notes, *(note for note in about if note)])
    lines += [""] if setup.settings else []
    lines += [f'{setting.name}="{setting.value}"  # set it: {setting.says}' for setting in setup.settings]
    where = "with kubectl and helm" if setup.manifests else "in the container"
    server = setup.server
    if setup.task_file:
        where, server = "without dstack, in a container of the image", setup.serving
    task = f"{setup.name}.dstack.yml"
    texts = [  # part, title, text, and the file that it is written to
        ("docker", "on the host", setup.docker, ""),
        ("task", f"for dstack: dstack apply -f {task}", setup.task_file, task),
        *(("manifests", file, text, file) for file, text in setup.manifests.items()),
        ("server", where, server, ""),
        ("client", "beside the server", setup.client, ""),
    ]
    for part, title, text, file in texts:
        if text:
            lines += ["", f"# ==== {part}: {title}", *_section(setup, part, text, file, gone)]
    lines += ["", *_comments(f"not there, {what}" for what in missing(setup))]
    return "\n".join(lines) + "\n"


def _section(setup: Configuration, part: str, text: str, file: str, gone: Mapping[str, str]) -> list[str]:
    """What a reader has to know of a text, as comments, and the text as mended. If it belongs into a file, a
    command writes it there; @NAME@ in it stands for the user's setting NAME."""
    mended: list[str] = []
    notes: list[str] = []
    if part == "client" and setup.client_source:
        notes.append(f"note: the commands are from {setup.client_source}")
    for mend in setup.mends:
        if mend.part not in (part, file):
            continue
        if mend.new is None:
            notes.append(f"note: {mend.why}")
        else:
            mended.append(f"mended: {mend.why}")
            text = text.replace(mend.old, mend.new)
    part_of_server = "server" if setup.server or setup.task_file else "docker"
    if part == part_of_server:
        notes += [f"note: {note}" for note in _variables(setup)]
    exports = []  # a dstack task's environment, if its commands are given without it
    if part == "server" and setup.task_file:
        exports = [f"export {name}={shlex.quote(value)}" for name, value in setup.environment.items()]
    for name in dict.fromkeys(re.findall(r"[\w-]+", "\n".join([*exports, text]))):
        if name in gone:
            today = f"; today {gone[name]}" if gone[name] else ""
            notes.append(f"no longer: today's engine has no {name}{today}")
    if file:
        names = [setting.name for setting in setup.settings if f"@{setting.name}@" in text]
        sed = " ".join(["sed", *(f'-e "s|@{name}@|${name}|g"' for name in names)])
        text = f"{sed if names else 'cat'} > {file} <<'EOF'\n{text}\nEOF"
    return [*_comments([*mended, *notes]), *exports, text]


def missing(setup: Configuration) -> Iterator[str]:
    """What the document does not give."""
    if not setup.docker and not setup.manifests:
        yield f"docker: the document gives no command; its image is {setup.image}"
    if not setup.serving and not setup.manifests:
        yield "server: the document gives no command"
    elif setup.docker and not setup.server:
        yield "server: the docker command starts it"
    if not setup.client:
        yield "client: the document gives no command, so its figures cannot be repeated from it"


def _variables(setup: Configuration) -> list[str]:
    """A text for each note on variables of the environments, with the names of its variables in front."""
    by_note: dict[str, dict[str, None]] = {}
    for name in setup.environments.values():
        for variable in recipes.find(name).variables:
            if variable.note and not variable.note.startswith("for "):  # such a note names only what reads it
                by_note.setdefault(variable.note, {})[variable.name] = None
    return [f"{', '.join(names)}: {note}" for note, names in by_note.items()]


def _comments(texts: Iterable[str]) -> list[str]:
    """The texts as comments of a shell script, at most WIDTH columns wide."""
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent="# ", subsequent_indent="#   ")
    wrapper.break_on_hyphens = wrapper.break_long_words = False
    return [line for text in texts for line in wrapper.wrap(text)]
