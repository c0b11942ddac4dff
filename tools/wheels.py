"""Makes a folder of wheels for set-up on a node that cannot reach a package index.

Run `make wheels FOR=3.12` here, and `make run WHEELS=folder` on the node.

The node's image must have torch and Triton. Most images also have the packages in IMAGE; --all fetches these
too, and those that `report` draws with. `wheels.json` beside the wheels names the Python and machine that
they are for, the packages that the image must have, and the SHA-256 of each wheel, which set-up checks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

from set_up import WHEELS, SetUpError, name_of, need_pip, pip, read_pins, read_project, say

IMAGE = ("numpy", "pandas", "scipy")  # packages of 60 MB, which images with torch have
TAGS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
"""Tags of wheels that a Linux of 2018 or later takes."""


def applying(requirements: list[str], python: str, machine: str) -> list[str]:
    """The requirements that apply on the node, without markers, which pip would apply to its own Python."""
    from pip._vendor.packaging.requirements import Requirement

    node = {"python_version": python, "platform_system": "Linux", "platform_machine": machine}
    found = []
    for text in requirements:
        marker = Requirement(text).marker
        if not marker or marker.evaluate(node):
            found.append(text.split(";")[0].strip())
    return found


def make(folder: Path, python: str, machine: str, everything: bool) -> None:
    """Makes the folder anew for the node's Python and machine; if `everything`, with what IMAGE and `report`
    need. Raises SetUpError if pip cannot fetch the wheels, or the folder was not made by this command."""
    if not re.fullmatch(r"3\.1\d", python):
        raise SetUpError(f"FOR={python}: name the node's Python, 3.10 or later, such as FOR=3.12")
    if folder.exists() and not (folder / WHEELS).exists():
        raise SetUpError(f"{folder} was not made by `make wheels`: name another folder with WHEELS=DIR")
    need_pip()
    project = read_project()
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["nvidia"]]
    of_image = ["torch", "triton"]
    if everything:
        requirements += extras["pictures"]
    else:
        of_image += IMAGE
    to_fetch = [text for text in applying(requirements, python, machine) if name_of(text) not in of_image]
    fresh = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    pins = fresh / "constraints.txt"
    pins.write_text("".join(f"{pin}\n" for pin in applying(read_pins(), python, machine)))
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for tag in TAGS:
        target += ["--platform", f"{tag}_{machine}"]
    output, reason = pip(sys.executable, "download", "-c", pins, "-d", fresh, *target, *to_fetch)
    if reason:
        print(output, file=sys.stderr)
        raise SetUpError(f"the wheels cannot be fetched: {reason}")
    pins.unlink()
    files = sorted(fresh.iterdir())
    size = sum(file.stat().st_size for file in files)
    about = {
        "python": python, "machine": machine, "image": [] if everything else list(IMAGE),
        "sha256": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
    }  # fmt: skip
    (fresh / WHEELS).write_text(json.dumps(about, indent=1) + "\n")
    if folder.exists():
        ours = {WHEELS, *json.loads((folder / WHEELS).read_text())["sha256"]}
        for file in folder.iterdir():  # keep the wheels that the user added
            if file.name not in ours and not (fresh / file.name).exists():
                file.rename(fresh / file.name)
        shutil.rmtree(folder)
    fresh.rename(folder)
    say(f"{len(files)} wheels for Python {python} on {machine}, {size / 1e6:.1f} MB, in {folder}")
    say(f"on the node: make run WHEELS={folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("folder", type=Path)
    parser.add_argument("--for", dest="python", required=True, metavar="VERSION", help="the node's, as 3.12")
    parser.add_argument("--machine", default="x86_64", help="the node's, or aarch64")
    parser.add_argument("--all", action="store_true", help="also what images mostly have, and what draws")
    options = parser.parse_args()
    try:
        make(options.folder, options.python, options.machine, options.all)
    except SetUpError as error:
        say(str(error))
        sys.exit(1)
