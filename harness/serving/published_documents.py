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
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from harness.catalogue import published, recipes
from harness.files import JsonObject
from harness.paths import PUBLISHED
from harness.serving.schema import Mode, OfferedLoad, Parallelism, ServingRun, StrictRecord

FOLDER = PUBLISHED / "serving"
WIDTH = 110
Text = Annotated[str, BeforeValidator(lambda v: "\n".join(v) if isinstance(v, list) else v)]
"""A text of several lines; in a file it may be a list of them."""


class Correction(StrictRecord):
    """A change of a documented text, so that it runs elsewhere.

    part: `docker`, `server`, `client`, `task`, or the file name of a manifest
    old:  a part of that text; new: replaces it everywhere; None: `why` is only a note
    why:  one line for the reader
    """

    part: str
    old: Text
    new: Text | None = None
    why: str


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
    """What a document ran. The texts are verbatim; `mends` and `settings` are ours.

    environments:           names in harness/catalogue/recipes.json, by role, which is empty for one server
    environment:            what these have in common; filled in when it is loaded
    flags:                  the server's, one string each; from its command if the file gives none
    concurrencies:          of the runs that the client's loop makes
    docker, server, client: shell commands; empty: the document gives none. `server` is empty too if the
                            docker command or the task file starts it
    client_source:          the source of the client's commands, if that is not the document
    task_file:              a dstack task
    manifests:              Kubernetes and Helm files, by name
    versions:               of what else is installed
    """

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
    flags: tuple[str, ...] = ()
    environments: dict[str, str] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    parallelism: Parallelism = Parallelism()
    roles: dict[str, Role] = Field(default_factory=dict)
    workload: OfferedLoad = OfferedLoad()
    concurrencies: tuple[int, ...] = ()
    docker: Text = ""
    server: Text = ""
    client: Text = ""
    client_source: str = ""
    task_file: Text = ""
    manifests: dict[str, Text] = Field(default_factory=dict)
    versions: tuple[str, ...] = ()
    settings: tuple[RecipeVariable, ...] = ()
    mends: tuple[Correction, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def serving(self) -> str:
        """The command that starts the server, from wherever the document has it; empty with manifests."""
        if self.server:
            return self.server
        return commands_of(self.task_file) or (self.image and self.docker.partition(self.image)[2])


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
    return {one.name: one for document in documents() for one in document.configurations}


def _document(path: Path) -> PublishedDocument:
    raw = published.read(path)
    made = [_configuration(one | {"document": raw["id"]}) for one in raw.get("configurations", ())]
    shared: dict[str, JsonObject] = {"": {}, **{one.name: _of_runs(one) for one in made}}
    runs = [ServingRun(**shared[run.get("configuration", "")] | run) for run in raw.get("runs", ())]
    return PublishedDocument(**raw | {"configurations": tuple(made), "runs": tuple(runs)})


def _configuration(raw: JsonObject) -> Configuration:
    one = Configuration(**raw)
    by_role = [recipes.find(name).environment for name in one.environments.values()]
    first = by_role[0] if by_role else {}
    common = {k: v for k, v in first.items() if all(env.get(k) == v for env in by_role)}
    return one.model_copy(update={"environment": common, "flags": one.flags or flags_of(one.serving)})


def _of_runs(one: Configuration) -> JsonObject:
    """The fields that runs of a configuration take from it."""
    names = ("hardware", "gpus", "nodes", "engine", "version", "image", "environment", "mode", "parallelism")
    flags = [f"{name}: {flag}" for name, role in one.roles.items() for flag in role.flags]
    return {name: getattr(one, name) for name in names} | {"flags": (*one.flags, *dict.fromkeys(flags))}


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
# document has it, except for the configuration's `mends`, each of which is told above its text.


def script(of: Configuration, gone: Mapping[str, str]) -> str:
    """The texts that the document gives, in the order in which they are used, as a shell script. gone: from
    flags and variables that current engines no longer have to what replaces them; texts with them say so"""
    about = dict.fromkeys(recipes.find(name).note for name in of.environments.values())
    heading = (f"{of.name}: {of.gpus} x {of.hardware}, {of.engine} {of.version}".rstrip(),
               f"document: {of.document}, {of.where}", f"image: {of.image}",
               "Verbatim from the document but for what is marked `mended`.")  # fmt: skip
    lines = _comments([*heading, *of.notes, *filter(None, about)])
    lines += [""] if of.settings else []
    lines += [f'{each.name}="{each.value}"  # set it: {each.says}' for each in of.settings]
    task = f"{of.name}.dstack.yml"
    where = "with kubectl and helm" if of.manifests else "in the container"
    where = "without dstack, in a container of the image" if of.task_file else where
    texts = [
        ("docker", "on the host", of.docker, ""),
        ("task", f"for dstack: dstack apply -f {task}", of.task_file, task),
        *(("manifests", file, text, file) for file, text in of.manifests.items()),
        ("server", where, of.serving if of.task_file else of.server, ""),
        ("client", "beside the server", of.client, ""),
    ]  # fmt: skip
    for part, title, text, file in texts:
        if text:
            lines += ["", f"# ==== {part}: {title}", *_section(of, part, text, file, gone)]
    return "\n".join([*lines, "", *_comments(f"not there, {what}" for what in missing(of))]) + "\n"


def _section(of: Configuration, part: str, text: str, file: str, gone: Mapping[str, str]) -> list[str]:
    """What a reader has to know of a text, as comments, and the text as mended: commands, or those that write
    it to a file, in which @NAME@ stands for the user's setting NAME."""
    mended, notes = list[str](), list[str]()
    if part == "client" and of.client_source:
        notes.append(f"the commands are from {of.client_source}")
    for mend in of.mends:
        if mend.part in (part, file):
            text = text if mend.new is None else text.replace(mend.old, mend.new)
            (notes if mend.new is None else mended).append(mend.why)
    if part == ("server" if of.server or of.task_file else "docker"):
        notes += _variables(of)
    exports = []  # a dstack task's environment, if its commands are given without it
    if part == "server" and of.task_file:
        exports = [f"export {name}={shlex.quote(value)}" for name, value in of.environment.items()]
    told = [f"mended: {why}" for why in mended] + [f"note: {why}" for why in notes]
    for name in dict.fromkeys(re.findall(r"[\w-]+", "\n".join([*exports, text]))):
        if name in gone:
            today = f"; today {gone[name]}" if gone[name] else ""
            told.append(f"no longer: today's engine has no {name}{today}")
    if file:
        filled = [each.name for each in of.settings if f"@{each.name}@" in text]
        sed = " ".join(["sed", *(f'-e "s|@{name}@|${name}|g"' for name in filled)])
        text = f"{sed if filled else 'cat'} > {file} <<'EOF'\n{text}\nEOF"
    return [*_comments(told), *exports, text]


def missing(of: Configuration) -> Iterator[str]:
    """What the document does not give."""
    if not of.docker and not of.manifests:
        yield f"docker: the document gives no command; its image is {of.image}"
    if not of.serving and not of.manifests:
        yield "server: the document gives no command"
    elif of.docker and not of.server:
        yield "server: the docker command starts it"
    if not of.client:
        yield "client: the document gives no command, so its figures cannot be repeated from it"


def _variables(of: Configuration) -> list[str]:
    """What is known of the environment's variables; those with the same note are together."""
    by_note: dict[str, dict[str, None]] = {}
    for name in of.environments.values():
        for variable in recipes.find(name).variables:
            if variable.note and not variable.note.startswith("for "):  # such a note names only what reads it
                by_note.setdefault(variable.note, {})[variable.name] = None
    return [f"{', '.join(names)}: {note}" for note, names in by_note.items()]


def _comments(texts: Iterable[str]) -> list[str]:
    how: dict[str, Any] = {"initial_indent": "# ", "subsequent_indent": "#   ", "break_on_hyphens": False}
    return [line for text in texts for line in textwrap.wrap(text, WIDTH, break_long_words=False, **how)]
