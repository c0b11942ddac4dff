"""The known names that an unknown name may stand for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

SHORT = 130  # the most characters of names that one line lists

OTHER_NAMES = {"bs": "batch", "b": "batch", "seqlen": "ctx", "seq": "ctx", "tokens": "m"}
"""A size's name in other projects -> its name here."""


def near(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """At most three known names that are like a name (by difflib: `cutoff` or more of 1) or have it as a
    word, the nearest first. One that differs only in capitals or in signs between words is the only one."""
    by_words = {_words(known_name): known_name for known_name in known}
    words = _words(name)
    if OTHER_NAMES.get(words) in by_words:
        words = OTHER_NAMES[words]
    if not words:
        return []
    if words in by_words:
        return [by_words[words]]
    similar = difflib.get_close_matches(words, by_words, 3, cutoff)
    containing = [known_words for known_words in by_words if f" {words} " in f" {known_words} "]
    return [by_words[known_words] for known_words in dict.fromkeys([*similar, *containing])][:3]


def _words(name: str) -> str:
    """`Block-scale_GEMM` -> `block scale gemm`"""
    return " ".join(re.findall("[a-z0-9]+", name.lower()))


def either(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def unknown(what: str, name: str, known: Iterable[str], see: str = "", of: str = "") -> str:
    """One line on an unknown name: `unknown op 'mla'; did you mean mla_decode? ops: ...`. It lists the known
    names if the list is short or there is no hint. see: the command that lists them; of: their owner"""
    names = list(known)
    owner = f" of {of}" if of else ""
    line = f"unknown {what} {name!r}{owner};"
    meant = near(name, names)
    if meant:
        line += f" did you mean {either(meant)}?"
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    listed = f" {plural}: {', '.join(names)}"
    if len(listed) <= SHORT or not (see or meant):
        return line + listed
    return f"{line} `{see}` shows all" if see else line
