"""What machine this is, read from made-up systems."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kernels.platform import _amd, available_memory, run

MI300X = "simd_count 1216\ngfx_target_version 90402\n"


def node(root: Path, number: int, properties: str) -> Path:
    folder = root / str(number)
    (folder / "mem_banks/0").mkdir(parents=True)
    (folder / "mem_banks/0/properties").write_text("heap_type 1\nsize_in_bytes 206141652992\n")
    (folder / "properties").write_text(properties)
    return folder


def test_gpus_that_a_container_was_not_given_are_no_devices(tmp_path):
    """The kernel driver shows their nodes and refuses to let them be read (kfd_topology.c: EPERM); a folder
    cannot be read either, by root too."""
    node(tmp_path, 0, "cpu_cores_count 96\ngfx_target_version 0\n")
    refused = node(tmp_path, 1, MI300X)
    node(tmp_path, 2, MI300X)
    (refused / "properties").unlink()
    (refused / "properties").mkdir()
    (found,) = _amd(tmp_path)
    assert (found.device, found.arch, found.memory) == ("cuda:0", "gfx942", 206141652992)


@pytest.mark.parametrize(
    ("files", "mebibytes"),
    [
        ({}, 4096),
        ({"memory.max": "max", "memory.current": "7"}, 4096),
        ({"memory.max": str(1024 << 20), "memory.current": str(256 << 20)}, 768),
        (
            {
                "memory/memory.limit_in_bytes": str(1024 << 20),
                "memory/memory.usage_in_bytes": str(512 << 20),
            },
            512,
        ),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "7"}, 4096),
    ],
    ids=["no group", "2, no limit", "2", "1", "1, no limit"],
)
def test_memory_is_what_the_control_group_leaves(tmp_path, files, mebibytes):
    of_root = {f"sys/fs/cgroup/{name}": content for name, content in files.items()}
    for name, content in (of_root | {"proc/meminfo": "MemAvailable: 4194304 kB"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    assert available_memory(tmp_path) == mebibytes << 20


def test_a_command_that_is_missing_fails_or_hangs_says_nothing(monkeypatch):
    assert run("echo", "it works") == "it works"
    assert run("no-such-command") == run("false") == ""

    def hang(*command, **how):
        raise subprocess.TimeoutExpired(command, 30)

    monkeypatch.setattr(subprocess, "run", hang)
    assert run("nvidia-smi") == ""
