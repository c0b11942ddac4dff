"""Recipes: the texts of a documented configuration as a shell script, ready for a user's own machine.

What a document writes stays as it is, but for the configuration's `mends`; each is told above its text.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.catalogue import recipes
from harness.serving.published.documents import Configuration, RecipeVariable

WIDTH = 110


@dataclass(frozen=True)
class Section:
    """One text of a recipe.

    part:     docker, task, manifests, server or client
    file:     that the text is the content of; empty: shell commands
    verbatim: as the document has it
    text:     as mended; in a file, @NAME@ stands for the shell variable NAME
    mended:   what was changed, and why; notes: what to know before it is used
    """

    part: str
    title: str
    verbatim: str
    text: str
    file: str = ""
    mended: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def sections(configuration: Configuration) -> list[Section]:
    """In the order in which they are used; only what there is."""
    sections_ = []
    if configuration.docker:
        sections_.append(_section(configuration, "docker", "on the host", configuration.docker))
    if configuration.task_file:
        file = f"{configuration.name}.dstack.yml"
        sections_.append(
            _section(
                configuration, "task", f"for dstack: dstack apply -f {file}", configuration.task_file, file
            )
        )
    sections_ += [
        _section(configuration, "manifests", file, text, file)
        for file, text in configuration.manifests.items()
    ]
    if configuration.task_file:
        sections_.append(
            _section(
                configuration, "server", "without dstack, in a container of the image", configuration.serving
            )
        )
    elif configuration.server:
        where = "with kubectl and helm" if configuration.manifests else "in the container"
        sections_.append(_section(configuration, "server", where, configuration.server))
    if configuration.client:
        sections_.append(_section(configuration, "client", "beside the server", configuration.client))
    return sections_


def missing(configuration: Configuration) -> list[str]:
    """What the document does not give."""
    lines = []
    if not configuration.docker and not configuration.manifests:
        lines.append(f"docker: the document gives no command; its image is {configuration.image}")
    if not configuration.serving and not configuration.manifests:
        lines.append("server: the document gives no command")
    elif configuration.docker and not configuration.server:
        lines.append("server: the docker command starts it")
    if not configuration.client:
        lines.append("client: the document gives no command, so its figures cannot be repeated from it")
    return lines


def script(configuration: Configuration, gone: Mapping[str, str]) -> str:
    """A shell script of all sections.

    gone: flags and variables that today's engines have no more -> what takes their place; each is told above
          the text that has it
    """
    lines = _head(configuration)
    if configuration.settings:
        lines += ["", *map(_set, configuration.settings)]
    for section in sections(configuration):
        lines += ["", f"# ==== {section.part}: {section.title}"]
        lines += _comments(f"mended: {why}" for why in section.mended)
        lines += _comments(f"note: {why}" for why in section.notes)
        exports = _exports(configuration, section)
        words = dict.fromkeys(re.findall(r"[\w-]+", "\n".join([*exports, section.text])))
        lines += _comments(
            f"no longer: today's engine has no {name}" + (f"; today {gone[name]}" if gone[name] else "")
            for name in words
            if name in gone
        )
        lines += [*exports, *_shell(configuration, section)]
    return "\n".join([*lines, "", *_comments(f"not there, {what}" for what in missing(configuration))]) + "\n"


def _section(configuration: Configuration, part: str, title: str, verbatim: str, file: str = "") -> Section:
    text = verbatim
    corrected: list[str] = []
    notes: list[str] = []
    for correction in configuration.mends:
        if correction.part in (part, file):
            (notes if correction.new is None else corrected).append(correction.why)
            text = text if correction.new is None else text.replace(correction.old, correction.new)
    if part == ("server" if configuration.server or configuration.task_file else "docker"):
        notes += _variables(configuration)
    if part == "client" and configuration.client_source:
        notes.insert(0, f"the commands are from {configuration.client_source}")
    return Section(part, title, verbatim, text, file, tuple(corrected), tuple(notes))


def _variables(configuration: Configuration) -> list[str]:
    """What is known of the environment's variables, those of the same note together."""
    by_note: dict[str, dict[str, None]] = {}
    for name in configuration.environments.values():
        for variable in recipes.find(name).variables:
            if variable.note and not variable.note.startswith("for "):  # that says only who reads it
                by_note.setdefault(variable.note, {})[variable.name] = None
    return [f"{', '.join(names)}: {note}" for note, names in by_note.items()]


def _head(configuration: Configuration) -> list[str]:
    engine = f"{configuration.engine} {configuration.version}".rstrip()
    about = [
        f"{configuration.name}: {configuration.gpus} x {configuration.hardware}, {engine}",
        f"document: {configuration.document}, {configuration.where}",
        f"image: {configuration.image}",
        "Verbatim from the document but for what is marked `mended`.",
        *configuration.notes,
        *dict.fromkeys(
            note for name in configuration.environments.values() if (note := recipes.find(name).note)
        ),
    ]
    return _comments(about)


def _set(setting: RecipeVariable) -> str:
    return f'{setting.name}="{setting.value}"  # set it: {setting.says}'


def _exports(configuration: Configuration, section: Section) -> list[str]:
    """A dstack task's environment, where its commands stand without it."""
    if section.part != "server" or not configuration.task_file:
        return []
    return [f"export {name}={shlex.quote(value)}" for name, value in configuration.environment.items()]


def _shell(configuration: Configuration, section: Section) -> list[str]:
    if not section.file:
        return [section.text]
    filled = [s.name for s in configuration.settings if f"@{s.name}@" in section.text]
    reader = "sed " + " ".join(f'-e "s|@{name}@|${name}|g"' for name in filled) if filled else "cat"
    return [f"{reader} > {section.file} <<'EOF'", section.text, "EOF"]


def _comments(texts: Iterable[str]) -> list[str]:
    wrapper = textwrap.TextWrapper(
        WIDTH,
        initial_indent="# ",
        subsequent_indent="#   ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line for text in texts for line in wrapper.wrap(text)]
