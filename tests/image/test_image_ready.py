"""One container in the strictest run, without any network: ready, proved, probed, and nothing in it but what belongs."""

import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from container import GID, PROCESSES, PYTHON, UID, Container

PROBE = ("sh", "-c", "curl -sf http://127.0.0.1:8888/health")


def processes(container: Container) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = container.python(PROCESSES)
    return found


def test_memories_come_back_by_their_meaning(ready: Container) -> None:
    assert "smoke passed" in ready.says("hindsight-sidecar", "smoke")


def test_the_run_was_as_strict_as_it_was_meant_to_be(ready: Container) -> None:
    status = ready.says("cat", "/proc/1/status")
    assert re.search(rf"^Uid:\t{UID}\t", status, re.MULTILINE)
    assert re.search(rf"^Gid:\t{GID}\t", status, re.MULTILINE)
    assert re.search(r"^CapBnd:\t0+$", status, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
    assert ready.says("ls", "/sys/class/net") == "lo\n"
    for place in ("/", "/var/tmp", "/opt", "/etc", "/home"):  # noqa: S108
        assert "Read-only file system" in ready.exec("touch", f"{place}/x").stderr, place
    assert ready.exec("getent", "passwd", str(UID)).returncode == 2


def test_the_usual_probe_takes_less_than_a_second(ready: Container) -> None:
    times = []
    for _ in range(10):
        began = time.monotonic()
        assert ready.exec(*PROBE).returncode == 0
        times.append(time.monotonic() - began)
    assert statistics.median(times) < 1
    assert max(times) < 1


def test_the_images_own_health_check_passes(ready: Container) -> None:
    assert ready.healthcheck() == 0


def test_commands_by_exec_need_no_options_and_no_passwd_entry(ready: Container) -> None:
    assert ready.says("psql", "-Atc", "select current_user, current_database()") == "hindsight|hindsight\n"
    assert "CREATE TABLE public.memory_units" in ready.says("pg_dump", "--schema-only")
    assert "in production" in ready.says("pg_controldata")
    assert "state     ready" in ready.says("hindsight-sidecar", "status")
    assert ready.says("hindsight-sidecar", "health").startswith("ready")
    script = "import getpass, pathlib; print(getpass.getuser(), pathlib.Path.home())"
    for python in (PYTHON, "/opt/hindsight-api/bin/python"):
        assert ready.says(python, "-c", script) == "hindsight /run/hindsight\n"


def test_nothing_runs_in_it_but_what_belongs(ready: Container) -> None:
    found = processes(ready)
    by_pid = {process["pid"]: process for process in found}
    backends = [process for process in found if process["words"][0].startswith("postgres: ")]
    others = {process["pid"]: process["words"] for process in found if process not in backends}
    postgres, api = ready.pid_of("postgres"), ready.pid_of("hindsight-api")
    sidecar = by_pid[postgres]["parent"]
    assert by_pid[1]["words"] == ["/usr/bin/tini", *by_pid[1]["words"][1:-2], "hindsight-sidecar", "serve"]
    assert by_pid[sidecar]["words"] == ["/opt/sidecar/bin/python", "/opt/sidecar/bin/hindsight-sidecar", "serve"]
    assert re.fullmatch(r"/usr/lib/postgresql/\d+/bin/postgres", by_pid[postgres]["words"][0])
    assert by_pid[api]["words"] == ["/opt/hindsight-api/bin/python", "/opt/hindsight-api/bin/hindsight-api"]
    assert set(others) == {1, sidecar, postgres, api}
    assert by_pid[sidecar]["parent"] == 1
    assert by_pid[api]["parent"] == sidecar
    assert {process["parent"] for process in backends} == {postgres}
    assert {process["uid"] for process in found} == {UID}


def test_every_listening_address_is_on_loopback(ready: Container) -> None:
    script = """
import ipaddress, json, pathlib, socket, struct
found = []
for table in ("tcp", "tcp6", "udp", "udp6"):
    path = pathlib.Path("/proc/net", table)
    for line in path.read_text().splitlines()[1:] if path.exists() else []:
        local, state = line.split()[1], line.split()[3]
        if state == ("0A" if table.startswith("tcp") else "07"):
            address, port = local.split(":")
            words = struct.pack(f"={len(address) // 8}I", *struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address)))
            found.append([table, str(ipaddress.ip_address(words)), int(port, 16)])
print(json.dumps(sorted(found)))
"""
    assert ready.python(script) == [["tcp", "127.0.0.1", port] for port in (8887, 8888, 8890)]


def test_nothing_was_looked_for_in_the_network(ready: Container) -> None:
    log = ready.log()
    assert "state=ready" in log
    assert "Traceback" not in log
    assert [line for line in log.splitlines() if re.search("WARNING|WARN |ERROR|CRITICAL", line)] == [
        # Postgres answers the sidecar's first look, before it has started, in its own words.
        line
        for line in log.splitlines()
        # hindsight-api's own, where other tests keep the machine busy.
        if line.endswith("FATAL:  the database system is starting up") or "[DB POOL] Slow acquire" in line
    ]
    assert not re.search(r"download|huggingface\.co|name resolution|retrying|unreachable", log, re.IGNORECASE)


@pytest.mark.parametrize("probes", [150, pytest.param(500, marks=pytest.mark.long)])
def test_probes_leave_nothing_behind(probes: int, ready: Container) -> None:
    def those_that_stay() -> list[tuple[int, str]]:
        # Postgres makes and ends processes of its own as it likes.
        found = processes(ready)
        assert [process for process in found if process["state"] == "Z"] == []
        assert len(found) < 40
        return sorted(
            (process["pid"], process["words"][0])
            for process in found
            if not process["words"][0].startswith("postgres: ")
        )

    before = those_that_stay()
    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(lambda _: ready.exec(*PROBE).returncode, range(probes)))
    assert codes == [0] * probes
    assert those_that_stay() == before
