"""A start, seen from outside: probed from the first moment, without a network, by any user, within its memory."""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import call, give_to_the_sidecar, wait_for

RSS_MAX = 85 * 10**6  # bytes


class Poller:
    """Asks one port for its health every 20 ms, and notes when the answer changed."""

    def __init__(self, port: int, began: float) -> None:
        self.changes: list[tuple[float, int]] = []
        self.refused_after_first = 0
        self.slowest = 0.0
        self._port = port
        self._began = began
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(0.02):
            asked = time.monotonic()
            try:
                status = call(self._port, "/health", timeout=10).status
            except OSError:
                self.refused_after_first += bool(self.changes)
                continue
            now = time.monotonic()
            if self.changes:
                self.slowest = max(self.slowest, now - asked)
            if not self.changes or self.changes[-1][1] != status:
                self.changes.append((now - self._began, status))

    def end(self) -> None:
        self._end.set()
        self._thread.join()


@pytest.mark.alone
def test_health_answers_within_a_second_and_turns_once(make_sidecar: Any) -> None:
    sidecar = make_sidecar()
    # The second start is looked at as well: there is no cluster to make, and everything comes sooner.
    for _ in range(2):
        watch_a_start(sidecar)
        assert sidecar.stop() == 0


def watch_a_start(sidecar: Any) -> None:
    before = len(sidecar.events())
    began = time.monotonic()
    sidecar.start()
    pollers = [Poller(port, began) for port in (sidecar.port, sidecar.control_port)]
    try:
        sidecar.wait_ready()
        wait_for(lambda: all(poller.changes[-1][1] == 200 for poller in pollers), 5, "200 on both")
        # A turn back would show within a few samples.
        deadline = time.monotonic() + 3
        wait_for(lambda: time.monotonic() > deadline, 5, "three seconds of being ready")
    finally:
        for poller in pollers:
            poller.end()
    for poller in pollers:
        assert [status for _, status in poller.changes] == [503, 200]
        assert poller.changes[0][0] < 1.0, f"first answer after {poller.changes[0][0]:.3f} s"
        assert poller.refused_after_first == 0
        assert poller.slowest < 1.0
    told = [
        event["event"]
        for event in sidecar.events()[before:]
        if event.get("state") == "ready" or "recalled" in event["event"]
    ]
    assert told == ["a memory was stored and recalled by its meaning", "state"]


@pytest.mark.alone
def test_every_phase_is_told_and_memory_calls_are_refused_at_once(make_sidecar: Any) -> None:
    sidecar = make_sidecar().start()
    phases: list[str] = []
    slowest = 0.0

    def ready() -> bool:
        nonlocal slowest
        try:
            began = time.monotonic()
            answer = sidecar.memory("/banks/any/memories/recall", "POST", {"query": "x"})
            if phases:
                slowest = max(slowest, time.monotonic() - began)
        except OSError:
            return False
        if answer.status in (200, 404):
            return True
        body = answer.json()
        assert answer.status == 503
        assert answer.headers["retry-after"]
        assert answer.headers["content-type"] == "application/problem+json"
        told = f"{body['state']}({body['subject']})"
        if told not in phases:
            phases.append(told)
        return False

    wait_for(ready, 120, "memory calls served", every=0.02)
    assert phases[-1] == "starting(hindsight-api)"
    assert "starting(postgres)" in phases or "starting(cluster)" in phases
    assert slowest < 1.0
    version = call(sidecar.port, "/version").json()
    assert version["api_version"] == "1.1.0"


def test_version_before_ready_is_what_hindsight_api_says_later(make_sidecar: Any) -> None:
    sidecar = make_sidecar(HINDSIGHT_API_ENABLE_FILE_UPLOAD_API="false", HINDSIGHT_API_AUDIT_LOG_ENABLED="true").start()
    [early] = wait_for(lambda: _version(sidecar), 5, "an answer to /version", every=0.01)  # the very first one
    sidecar.wait_ready()
    assert call(sidecar.api_port, "/version").json() == early
    assert call(sidecar.port, "/version").json() == early


def _version(sidecar: Any) -> list[Any]:
    try:
        return [call(sidecar.port, "/version").json()]
    except OSError:
        return []


def cut_off(*more: str) -> list[str]:
    """Return the words that put a program where there is no network but loopback."""
    mine = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    return ["unshare", "--net", *mine, sys.executable, "-P", str(Path(__file__).with_name("cut_off.py")), *more]


def probe_inside(sidecar: Any, path: str = "/health") -> bool:
    """Ask a cut-off sidecar, from within its namespace."""
    pid = sidecar.process.pid
    mine = [] if os.geteuid() == 0 else ["--preserve-credentials", f"--user=/proc/{pid}/ns/user"]
    enter = ["nsenter", f"--net=/proc/{pid}/ns/net", *mine]
    # Not curl: it looks for a route of its own, which the kernel counts.
    ask = "import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)"
    url = f"http://127.0.0.1:{sidecar.port}{path}"
    return (
        subprocess.run([*enter, sys.executable, "-P", "-c", ask, url], check=False, capture_output=True).returncode == 0
    )


def unroutable(pid: int) -> int:
    """Return how many packets for elsewhere the kernel had no route for, in the namespace of a process."""
    snmp = Path(f"/proc/{pid}/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in snmp if line.startswith("Ip:"))
    six = dict(line.split() for line in Path(f"/proc/{pid}/net/snmp6").read_text().splitlines())
    return int(values[names.index("OutNoRoutes")]) + int(six["Ip6OutNoRoutes"])


def seconds_to_ready(sidecar: Any, wrapper: list[str]) -> float:
    """Start it and return how long it took; its own log tells, as asking from inside would take the cores it needs."""
    before = len(sidecar.log_text())
    began = time.monotonic()
    sidecar.start(wrapper)
    wait_for(lambda: '"state": "ready"' in sidecar.log_text()[before:], 180, "ready")
    return time.monotonic() - began


@pytest.mark.long  # that it is ready without one is a part of the next, and of what the image is tested with
def test_without_a_network_it_is_ready_as_soon(make_sidecar: Any) -> None:
    sidecar = make_sidecar()
    seconds_to_ready(sidecar, [])  # makes the cluster, which is not part of the comparison
    assert sidecar.stop() == 0
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(2):  # the better of two each, in turns: what else runs on the machine disturbs both alike
        for name, wrapper in (("with", []), ("without", cut_off())):
            seconds[name].append(seconds_to_ready(sidecar, wrapper))
            assert sidecar.stop() == 0
    assert min(seconds["without"]) < min(seconds["with"]) * 1.25 + 0.5, seconds


def test_no_attempt_is_made_to_connect_elsewhere(make_sidecar: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    calls = "trace=connect,sendto,sendmsg,sendmmsg"
    traced = ["strace", "-D", "-f", "-qq", "-e", calls, "-e", "signal=none", "-o", str(trace)]
    # `make setup` installs strace where it may. The kernel's own count of packets without a route is looked at anyway.
    sidecar = make_sidecar()
    seconds_to_ready(sidecar, cut_off(*(traced if shutil.which("strace") else [])))
    # onnxruntime's telemetry would begin some ten seconds after hindsight-api's start.
    later = time.monotonic() + 20
    wait_for(lambda: time.monotonic() > later, 25, "time for whatever calls home")
    assert probe_inside(sidecar)
    assert unroutable(sidecar.process.pid) == 0
    assert sidecar.stop(60) == 0
    if shutil.which("strace"):
        assert_loopback_only(trace)


def assert_loopback_only(trace: Path) -> None:
    inet = [line for line in trace.read_text(encoding="utf-8", errors="replace").splitlines() if "AF_INET" in line]
    assert inet, "the trace shows no connection at all, so it proves nothing"
    loopback = re.compile(r'inet_addr\("127\.|inet_pton\(AF_INET6, "(::1|::ffff:127\.)')
    assert [line for line in inet if not loopback.search(line)] == []


def test_memory_of_the_sidecar_itself(make_sidecar: Any, memories: dict[str, Any]) -> None:
    sidecar = make_sidecar().start_ready()
    for bank, items in memories["banks"].items():
        sidecar.retain(bank, [item["content"] for item in items])
    for question in memories["paraphrases"]:
        sidecar.recall(question["bank"], question["query"])
    call(sidecar.control_port, "/metrics")
    status = Path(f"/proc/{sidecar.process.pid}/status").read_text()
    rss = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
    assert rss < RSS_MAX, f"{rss / 1e6:.1f} MB"


def test_an_empty_directory_and_lost_and_found_are_no_hindrance(make_sidecar: Any) -> None:
    sidecar = make_sidecar()
    for path in (sidecar.volume, sidecar.volume / "lost+found", sidecar.pgdata):
        path.mkdir()
        give_to_the_sidecar(path)
    sidecar.start_ready()
    assert (sidecar.volume / "lost+found").is_dir()
