"""A /proc and /sys that a test writes, in the formats of proc(5), and CPU clocks of made-up processes."""

import os
from pathlib import Path

from harness.machine.monitor.cpu import TICK_S, Counters


class FakeLinux:
    """Idle CPUs, two by default. Time passes only in `pass_time`, which lets them work."""

    def __init__(self, root: Path, cpus: int = 2, virtual: bool = True) -> None:
        self.root = root
        self.now = 100.0
        self.ticks = {cpu: dict.fromkeys(("user", "idle", "steal"), 0.0) for cpu in range(cpus)}
        self.seconds = {os.getpid(): 1.0}
        self.reaped: dict[int, float] = {}
        self.tree: dict[int, dict[int, list[int]]] = {}
        self.last_cpu: dict[int, int] = {}
        self.write("proc/loadavg", "0.50 0.40 0.30 1/234 5678\n")
        self.write("proc/cpuinfo", f"flags\t\t: fpu{' hypervisor' if virtual else ''} avx2\n")
        self.flush()

    def write(self, path: str, content: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)

    def start(self, pid: int, threads: dict[int, list[int]] | None = None, name: str = "python") -> None:
        """threads: thread -> the processes that it started."""
        self.seconds.setdefault(pid, 0.0)
        self.tree[pid] = threads or {pid: []}
        self.write(f"proc/{pid}/comm", name + "\n")
        self.flush()

    def stop(self, pid: int) -> None:
        del self.seconds[pid], self.tree[pid]
        for file in (self.root / f"proc/{pid}").rglob("*"):
            if file.is_file():
                file.unlink()

    def pass_time(self, wall: float, busy: dict[int, float], stolen: dict[int, float] | None = None) -> None:
        """busy, stolen: CPU -> seconds; for the rest of `wall` seconds it is idle."""
        self.now += wall
        for cpu, ticks in self.ticks.items():
            used, lost = busy.get(cpu, 0.0), (stolen or {}).get(cpu, 0.0)
            ticks["user"] += used / TICK_S
            ticks["steal"] += lost / TICK_S
            ticks["idle"] += (wall - used - lost) / TICK_S
        self.flush()

    def use(self, pid: int, seconds: float) -> None:
        self.seconds[pid] += seconds

    def flush(self) -> None:
        def line(name: str, of: list[dict[str, float]]) -> str:
            user, idle, steal = (int(sum(t[k] for t in of) + 1e-6) for k in ("user", "idle", "steal"))
            waiting = idle // 3  # waiting for a disk, which counts as idle
            return f"{name} {user} 0 0 {idle - waiting} {waiting} 0 0 {steal} 0 0\n"

        lines = [line("cpu ", list(self.ticks.values()))]
        lines += [line(f"cpu{cpu}", [ticks]) for cpu, ticks in self.ticks.items()]
        self.write("proc/stat", "".join(lines) + "intr 1 2 3\nctxt 9\n")
        for pid, threads in self.tree.items():
            fields = ["0"] * 50
            fields[0] = "S"
            fields[13] = str(int(self.reaped.get(pid, 0.0) / TICK_S))
            fields[36] = str(self.last_cpu.get(pid, 0))
            # A name may contain brackets.
            self.write(f"proc/{pid}/stat", f"{pid} (py) thon) {' '.join(fields)}\n")
            for thread, children in threads.items():
                self.write(f"proc/{pid}/task/{thread}/children", " ".join(map(str, children)) + " ")

    def cpu_time(self, pid: int) -> float:
        if pid not in self.seconds:
            raise OSError(22, "Invalid argument")
        return self.seconds[pid]

    def counters(self, cpus: tuple[int, ...] | None = None) -> Counters:
        mine = tuple(self.ticks) if cpus is None else cpus
        return Counters(self.root, mine, self.cpu_time, lambda: self.now)
