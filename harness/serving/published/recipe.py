"""What `serving recipe` prints of a documented configuration: its texts, ready for a user's own machine.

What a document writes stays as it is, but for the configuration's `mends`; each is told above its text.
"""

from __future__ import annotations

import difflib
import shlex
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from harness.catalogue import recipes
from harness.errors import UsageError
from harness.serving.published.documents import Configuration, Setting, configurations

PARTS = ("docker", "task", "manifests", "server", "client")
WIDTH = 110


@dataclass(frozen=True)
class Section:
    """One text of a recipe.

    part:     of PARTS
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


def find(name: str) -> Configuration:
    """By its name, or by that of an environment it sets. Raises UsageError for an unknown one."""
    known = configurations()
    owners = {e: c.name for c in known.values() for e in c.environments.values()} | {n: n for n in known}
    if name in owners:
        return known[owners[name]]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    raise UsageError(
        f"unknown recipe {name!r}; {'near' if near else 'recipes'}: {', '.join(near or known)}"
        + ("; `serving recipe` lists all" if near else "")
    )


def sections(one: Configuration) -> list[Section]:
    """In the order in which they are used; only what there is."""
    found = []
    if one.docker:
        found.append(_section(one, "docker", "on the host", one.docker))
    if one.task_file:
        file = f"{one.name}.dstack.yml"
        found.append(_section(one, "task", f"for dstack: dstack apply -f {file}", one.task_file, file))
    found += [_section(one, "manifests", file, text, file) for file, text in one.manifests.items()]
    if one.task_file:
        found.append(_section(one, "server", "without dstack, in a container of the image", one.serving))
    elif one.server:
        where = "with kubectl and helm" if one.manifests else "in the container"
        found.append(_section(one, "server", where, one.server))
    if one.client:
        found.append(_section(one, "client", "beside the server", one.client))
    return found


def missing(one: Configuration) -> list[str]:
    """What the document does not give."""
    found = []
    if not one.docker and not one.manifests:
        found.append(f"docker: the document gives no command; its image is {one.image}")
    if not one.serving and not one.manifests:
        found.append("server: the document gives no command")
    elif one.docker and not one.server:
        found.append("server: the docker command starts it")
    if not one.client:
        found.append("client: the document gives no command, so its figures cannot be repeated from it")
    return found


def script(one: Configuration, part: str = "") -> str:
    """A shell script of all sections, or of one part. Raises UsageError where there is no such part."""
    chosen = [section for section in sections(one) if part in ("", section.part)]
    if not chosen:
        there = ", ".join(dict.fromkeys(section.part for section in sections(one)))
        raise UsageError(f"recipe {one.name!r} has no {part}; it has: {there} ({'; '.join(missing(one))})")
    lines = _head(one)
    if one.settings:
        lines += ["", *map(_set, one.settings)]
    for section in chosen:
        lines += ["", f"# ==== {section.part}: {section.title}"]
        lines += _comments(f"mended: {why}" for why in section.mended)
        lines += _comments(f"note: {why}" for why in section.notes)
        lines += [*_exports(one, section), *_shell(one, section)]
    if not part:
        lines += ["", *_comments(f"not there, {what}" for what in missing(one))]
    return "\n".join(lines).rstrip() + "\n"


def _section(one: Configuration, part: str, title: str, verbatim: str, file: str = "") -> Section:
    text, mended, notes = verbatim, [], []
    for mend in one.mends:
        if mend.part in (part, file):
            (notes if mend.new is None else mended).append(mend.why)
            text = text if mend.new is None else text.replace(mend.old, mend.new)
    if part == ("server" if one.server or one.task_file else "docker"):
        notes += _variables(one)
    if part == "client" and one.client_source:
        notes.insert(0, f"the commands are from {one.client_source}")
    return Section(part, title, verbatim, text, file, tuple(mended), tuple(notes))


def _variables(one: Configuration) -> list[str]:
    """What is known of the environment's variables, those of the same note together."""
    by_note: dict[str, dict[str, None]] = {}
    for name in one.environments.values():
        for variable in recipes.find(name).variables:
            if variable.note and not variable.note.startswith("for "):  # that says only who reads it
                by_note.setdefault(variable.note, {})[variable.name] = None
    return [f"{', '.join(names)}: {note}" for note, names in by_note.items()]


def _head(one: Configuration) -> list[str]:
    about = [
        f"{one.name}: {one.gpus} x {one.hardware}, {one.engine} {one.version}".rstrip(),
        f"document: {one.document}, {one.where}",
        f"image: {one.image}",
        "Verbatim from the document but for what is marked `mended`.",
        *one.notes,
        *dict.fromkeys(note for name in one.environments.values() if (note := recipes.find(name).note)),
    ]
    return _comments(about)


def _set(setting: Setting) -> str:
    return f'{setting.name}="{setting.value}"  # set it: {setting.says}'


def _exports(one: Configuration, section: Section) -> list[str]:
    """A dstack task's environment, where its commands stand without it."""
    if section.part != "server" or not one.task_file:
        return []
    return [f"export {name}={shlex.quote(value)}" for name, value in one.environment.items()]


def _shell(one: Configuration, section: Section) -> list[str]:
    if not section.file:
        return [section.text]
    filled = [s.name for s in one.settings if f"@{s.name}@" in section.text]
    reader = "sed " + " ".join(f'-e "s|@{name}@|${name}|g"' for name in filled) if filled else "cat"
    return [f"{reader} > {section.file} <<'EOF'", section.text, "EOF"]


def _comments(texts: Iterable[str]) -> list[str]:
    options = {"initial_indent": "# ", "subsequent_indent": "#   ", "break_on_hyphens": False}
    return [line for text in texts for line in textwrap.wrap(text, WIDTH, break_long_words=False, **options)]
