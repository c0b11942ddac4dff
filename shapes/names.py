"""What somebody may have meant by a name that nothing has."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

SHORT = 130
"""The most characters of names that one line lists."""

ALSO = {"bs": "batch", "b": "batch", "seqlen": "ctx", "seq": "ctx", "tokens": "m"}
"""What others call a size -> its name here."""


def near(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """At most three known names that are like a name or have it as one of their words, the nearest first. One
    that differs only in capitals or in the signs between its words is the only one."""
    spelled = {_plain(each): each for each in known}
    wanted = _plain(name)
    wanted = ALSO[wanted] if ALSO.get(wanted) in spelled else wanted
    if not wanted or wanted in spelled:
        return [spelled[wanted]] if wanted else []
    like = difflib.get_close_matches(wanted, spelled, 3, cutoff)
    having = [each for each in spelled if f" {wanted} " in f" {each} "]
    return [spelled[each] for each in dict.fromkeys([*like, *having])][:3]


def _plain(name: str) -> str:
    return " ".join(re.findall("[a-z0-9]+", name.lower()))


def unknown(what: str, name: str, known: Iterable[str], see: str = "", of: str = "") -> str:
    """One line on a name that nothing has: `unknown op 'mla'; did you mean mla_decode? ops: ...`.

    known: what there is; the line lists it where it is short, or where there is nothing else to say
    see:   the command that lists it
    of:    what the names belong to
    """
    names = list(known)
    *others, last = near(name, names) or [""]
    meant = f" did you mean {' or '.join(filter(None, [', '.join(others), last]))}?" if last else ""
    there = f" {what[:-1] + 'ie' if what.endswith('y') else what}s: {', '.join(names)}"
    if len(there) > SHORT and (see or meant):
        there = f" `{see}` shows all" if see else ""
    return f"unknown {what} {name!r}{f' of {of}' if of else ''};{meant}{there}"
