"""Recipes: the texts of a documented configuration as a shell script, ready for a user's own machine.

A text stays as the document has it, except for the configuration's `mends`; each is told above its text.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from harness.catalogue import recipes
from harness.serving.published.documents import Configuration

WIDTH = 110


@dataclass(frozen=True)
class Section:
    """One text of a recipe.

    part:     docker, task, manifests, server or client
    file:     the file that the text is the content of; empty: it is shell commands
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


def sections(of: Configuration) -> list[Section]:
    """The texts that the document gives, in the order in which they are used."""
    task = f"{of.name}.dstack.yml"
    where = "with kubectl and helm" if of.manifests else "in the container"
    where = "without dstack, in a container of the image" if of.task_file else where
    texts = [
        ("docker", "on the host", of.docker, ""),
        ("task", f"for dstack: dstack apply -f {task}", of.task_file, task),
        *(("manifests", file, text, file) for file, text in of.manifests.items()),
        ("server", where, of.serving if of.task_file else of.server, ""),
        ("client", "beside the server", of.client, ""),
    ]
    return [_section(of, *each) for each in texts if each[2]]


def _section(of: Configuration, part: str, title: str, verbatim: str, file: str) -> Section:
    mends = [mend for mend in of.mends if mend.part in (part, file)]
    text = verbatim
    for mend in mends:
        text = text if mend.new is None else text.replace(mend.old, mend.new)
    notes = [mend.why for mend in mends if mend.new is None]
    if part == ("server" if of.server or of.task_file else "docker"):
        notes += _variables(of)
    if part == "client" and of.client_source:
        notes.insert(0, f"the commands are from {of.client_source}")
    mended = tuple(mend.why for mend in mends if mend.new is not None)
    return Section(part, title, verbatim, text, file, mended, tuple(notes))


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


def script(of: Configuration, gone: Mapping[str, str]) -> str:
    """A shell script of all sections.

    gone: flags and variables that today's engines no longer have -> what takes their place; each is told
          above the text that has it
    """
    about = dict.fromkeys(recipes.find(name).note for name in of.environments.values())
    lines = _comments(
        [
            f"{of.name}: {of.gpus} x {of.hardware}, {of.engine} {of.version}".rstrip(),
            f"document: {of.document}, {of.where}",
            f"image: {of.image}",
            "Verbatim from the document but for what is marked `mended`.",
            *of.notes,
            *filter(None, about),
        ]
    )
    lines += [""] if of.settings else []
    lines += [f'{each.name}="{each.value}"  # set it: {each.says}' for each in of.settings]
    for section in sections(of):
        exports = []  # a dstack task's environment, where its commands stand without it
        if section.part == "server" and of.task_file:
            exports = [f"export {name}={shlex.quote(value)}" for name, value in of.environment.items()]
        words = dict.fromkeys(re.findall(r"[\w-]+", "\n".join([*exports, section.text])))
        told = [f"mended: {why}" for why in section.mended] + [f"note: {why}" for why in section.notes]
        told += [
            f"no longer: today's engine has no {name}" + (f"; today {gone[name]}" if gone[name] else "")
            for name in words
            if name in gone
        ]
        lines += ["", f"# ==== {section.part}: {section.title}", *_comments(told), *exports]
        lines += _written(of, section) if section.file else [section.text]
    return "\n".join([*lines, "", *_comments(f"not there, {what}" for what in missing(of))]) + "\n"


def _variables(of: Configuration) -> list[str]:
    """What is known of the environment's variables; those with the same note together."""
    by_note: dict[str, dict[str, None]] = {}
    for name in of.environments.values():
        for variable in recipes.find(name).variables:
            if variable.note and not variable.note.startswith("for "):  # that says only who reads it
                by_note.setdefault(variable.note, {})[variable.name] = None
    return [f"{', '.join(names)}: {note}" for note, names in by_note.items()]


def _written(of: Configuration, section: Section) -> list[str]:
    """Commands that write a section's file, with the user's settings in it."""
    filled = [each.name for each in of.settings if f"@{each.name}@" in section.text]
    reader = "sed " + " ".join(f'-e "s|@{name}@|${name}|g"' for name in filled) if filled else "cat"
    return [f"{reader} > {section.file} <<'EOF'", section.text, "EOF"]


def _comments(texts: Iterable[str]) -> list[str]:
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent="# ", subsequent_indent="#   ")
    wrapper.break_on_hyphens = wrapper.break_long_words = False
    return [line for text in texts for line in wrapper.wrap(text)]
