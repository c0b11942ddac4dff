"""Published serving results as data: what a document ran, what it measured, and what it claims.

One JSON file a document in `results/published/serving`. What a document leaves open stays open: a metric
has `unknown` scope or tokens there, and its `label` says how the document writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from harness.catalogue import published, recipes
from harness.errors import UsageError, mistake
from harness.files import JsonObject
from harness.paths import PUBLISHED
from harness.serving.published.shell import commands_of, flags_of
from harness.serving.schema import Mode, OfferedLoad, Parallelism, ServingRun, StrictRecord

FOLDER = PUBLISHED / "serving"
ELSEWHERE = ("claims:", "dstack.")
"""Beginnings of what claims refer to outside the documents."""

Text = Annotated[str, BeforeValidator(lambda v: "\n".join(v) if isinstance(v, list) else v)]
"""Of several lines; in a file also a list of them."""


class Correction(StrictRecord):
    """What `serving ab --template` changes in a documented text, so that it runs elsewhere.

    part: `docker`, `server`, `client`, `task`, or the file name of a manifest
    old:  stands in that text
    new:  takes its place, everywhere; None: nothing is changed, the reader is only told
    why:  one line for the reader
    """

    part: str
    old: Text
    new: Text | None = None
    why: str


class RecipeVariable(StrictRecord):
    """A shell variable of a recipe, and what its user is to set it to."""

    name: str
    value: str
    says: str


class Role(StrictRecord):
    """One of several servers of a configuration, as `prefill`: what is its own, beside what all share."""

    instances: int = 1
    gpus: int | None = None
    nodes: int | None = None
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)


class Configuration(StrictRecord):
    """What a document ran: the texts are verbatim, the mends are ours.

    name:         also that of `serving ab --template NAME`
    environments: names in harness/catalogue/recipes.json, by role; a single server's role is empty
    environment:  what these have in common, filled in by the loader
    flags:        the server's, one string for each; those of all roles where there are several. By the
                  loader from its command where the file gives none
    workload:     what its client asks for; concurrencies: of the runs that the client's loop makes
    docker, server, client: shell commands; empty: the document gives none. A server that only the docker
                  command or the task file starts is not repeated
    client_source: where the client's commands stand, if not in the document
    task_file:    a dstack task
    manifests:    texts of Kubernetes and Helm files, by file name
    versions:     of what else is installed, as listed by the document
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
        """The command that starts the server, wherever it stands; empty where manifests do."""
        if self.server:
            return self.server
        return commands_of(self.task_file) or (self.image and self.docker.partition(self.image)[2])


class PublishedDocument(StrictRecord):
    """A document read in full.

    date:   as it gives it itself; empty: none
    url:    where it is published, as far as known
    sha256: of the text that was read
    """

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
    """Those of a folder, in the order of their files' names. Raises UsageError where one does not hold:
    broken, an id twice, a reference to nothing."""
    published_documents = [_document(path) for path in sorted(folder.glob("*.json"))]
    if not published_documents:
        raise UsageError(f"no published document in {folder}")
    _examine(published_documents)
    return published_documents


def configurations(folder: Path = FOLDER) -> dict[str, Configuration]:
    """All documents' configurations, by name."""
    return {
        configuration.name: configuration
        for document in documents(folder)
        for configuration in document.configurations
    }


def _document(path: Path) -> PublishedDocument:
    raw = published.read(path)
    try:
        if not isinstance(raw, dict):
            raise TypeError("an object is wanted")
        about = raw.get("id", "")
        made = {
            configuration["name"]: _configuration(configuration, about)
            for configuration in raw.get("configurations", ())
        }
        raw["configurations"] = tuple(made.values())
        raw["runs"] = tuple(_run(run, made) for run in raw.get("runs", ()))
        return PublishedDocument(**raw)
    except ValidationError as error:
        raise UsageError(f"cannot read {path}: {error.title} {mistake(error)}") from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {type(error).__name__}: {error}") from None


def _configuration(raw: Mapping[str, Any], document: str) -> Configuration:
    configuration = Configuration(**{**raw, "document": document})
    every = {role: recipes.find(name).environment for role, name in configuration.environments.items()}
    shared = dict.fromkeys(k for env in every.values() for k in env)
    common = {
        k: next(iter(every.values()))[k] for k in shared if len({env.get(k) for env in every.values()}) == 1
    }
    roles = {
        name: role.model_copy(
            update={"environment": {k: v for k, v in every.get(name, {}).items() if k not in common}}
        )
        for name, role in configuration.roles.items()
    }
    flags = configuration.flags or flags_of(configuration.serving)
    return configuration.model_copy(update={"environment": common, "roles": roles, "flags": flags})


def _run(raw: Mapping[str, Any], made: Mapping[str, Configuration]) -> ServingRun:
    """A run, with what it leaves out taken from its configuration."""
    about = made[raw["configuration"]] if raw.get("configuration") else None
    shared = {}
    if about:
        names = ("hardware", "gpus", "nodes", "engine", "version", "image", "flags", "environment", "mode")
        shared = {name: getattr(about, name) for name in (*names, "parallelism")}
        roles = {f"{name}: {flag}": None for name, role in about.roles.items() for flag in role.flags}
        shared["flags"] = (*about.flags, *roles)
    return ServingRun(**{**shared, **raw})


def _examine(published_documents: list[PublishedDocument]) -> None:
    """Raises UsageError where an id stands twice, or a claim refers to what is not there."""
    named = [c.name for d in published_documents for c in d.configurations]
    claims = [claim for d in published_documents for claim in d.claims]
    known = [run.id for d in published_documents for run in d.runs] + [claim["id"] for claim in claims]
    for ids in (named, known):
        twice = next((id_ for id_ in ids if ids.count(id_) > 1), None)
        if twice:
            raise UsageError(f"published documents: {twice!r} stands twice")
    for claim in claims:
        missing = [r for r in claim.get("refers_to", ()) if r not in known and not r.startswith(ELSEWHERE)]
        missing += {claim.get("configuration", "")} - {"", *named}
        if missing:
            raise UsageError(
                f"published documents: {claim['id']} refers to {missing[0]!r}, which is not there"
            )
