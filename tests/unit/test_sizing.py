import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.sizing import (
    API_POOL,
    GIB,
    MIB,
    Machine,
    core_limit,
    die_together,
    memory_left,
    memory_limit,
    postgres_settings,
)

TOTAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
CORES = len(os.sched_getaffinity(0))
V2 = "sys/fs/cgroup"
V1_MEMORY = "sys/fs/cgroup/memory/memory.limit_in_bytes"


def put(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_without_a_cgroup_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) == TOTAL
    assert core_limit(tmp_path) == CORES


@pytest.mark.parametrize("name", [f"{V2}/memory.max", V1_MEMORY])
@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (f"{256 * MIB}\n", 256 * MIB),
        ("max\n", TOTAL),
        ("9223372036854771712\n", TOTAL),
        ("", TOTAL),
        ("-1\n", TOTAL),
        ("0\n", TOTAL),
    ],
)
def test_the_memory_limit_of_either_cgroup_version(name: str, text: str, limit: int, tmp_path: Path) -> None:
    put(tmp_path, name, text)
    assert memory_limit(tmp_path) == limit


def test_of_two_memory_limits_the_smaller_one_holds(tmp_path: Path) -> None:
    put(tmp_path, f"{V2}/memory.max", str(512 * MIB))
    put(tmp_path, V1_MEMORY, str(256 * MIB))
    assert memory_limit(tmp_path) == 256 * MIB


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", CORES), ("50000 100000\n", 1), ("100000 100000\n", 1), ("1000 100000\n", 1),
     ("6400000 100000\n", min(CORES, 64)), ("150000 100000\n", min(CORES, 2)), ("nonsense\n", CORES)],
)  # fmt: skip
def test_the_quota_of_cgroup_2_is_rounded_up(text: str, cores: int, tmp_path: Path) -> None:
    put(tmp_path, f"{V2}/cpu.max", text)
    assert core_limit(tmp_path) == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [("-1", "100000", CORES), ("50000", "100000", 1), ("20000", None, 1), ("6400000", "100000", min(CORES, 64))],
)
def test_the_quota_of_cgroup_1(quota: str, period: str | None, cores: int, tmp_path: Path) -> None:
    put(tmp_path, f"{V2}/cpu/cpu.cfs_quota_us", f"{quota}\n")
    if period is not None:
        put(tmp_path, f"{V2}/cpu/cpu.cfs_period_us", f"{period}\n")
    assert core_limit(tmp_path) == cores


@pytest.mark.parametrize(
    ("machine", "buffers", "cache", "maintenance", "workers"),
    [
        (Machine(256 * MIB, 1), "32MB", "64MB", "32MB", "0"),
        (Machine(2 * GIB, 2), "128MB", "512MB", "128MB", "1"),
        (Machine(16 * GIB, 8), "1024MB", "4096MB", "512MB", "2"),
        (Machine(1024 * GIB, 128), "1024MB", "16384MB", "512MB", "2"),
    ],
)
def test_sizes(machine: Machine, buffers: str, cache: str, maintenance: str, workers: str) -> None:
    settings = postgres_settings(machine)
    assert settings["shared_buffers"] == buffers
    assert settings["effective_cache_size"] == cache
    assert settings["maintenance_work_mem"] == maintenance
    assert settings["max_parallel_maintenance_workers"] == workers


@given(st.integers(64 * MIB, 4096 * GIB), st.integers(1, 512))
def test_every_setting_is_one_word_that_the_init_script_can_take(memory: int, cores: int) -> None:
    settings = postgres_settings(Machine(memory, cores))
    for name, value in settings.items():
        assert re.fullmatch(r"[a-z_]+", name)
        assert re.fullmatch(r"[A-Za-z0-9]*", value)
    assert int(settings["max_connections"]) > API_POOL
    assert int(settings["shared_buffers"].removesuffix("MB")) * MIB <= max(memory // 2, 32 * MIB)


def test_what_keeps_memories_is_on_and_what_reaches_out_is_off() -> None:
    settings = postgres_settings(Machine(GIB, 1))
    assert [settings[name] for name in ("fsync", "full_page_writes", "synchronous_commit")] == ["on"] * 3
    assert "listen_addresses" not in settings  # initscripts/20-postgres says it, also where it is run by hand
    assert settings["unix_socket_permissions"] == "0700"
    assert settings["dynamic_shared_memory_type"] == "mmap"


def test_what_is_left_of_the_limit(tmp_path: Path) -> None:
    assert (memory_left(tmp_path), die_together(tmp_path)) == (None, False)
    put(tmp_path, f"{V2}/memory.max", str(512 * MIB))
    put(tmp_path, f"{V2}/memory.current", str(500 * MIB))
    assert memory_left(tmp_path) == 12 * MIB
    put(tmp_path, f"{V2}/memory.stat", f"anon 1\nfile {90 * MIB}\ninactive_file {30 * MIB}\nactive_file {10 * MIB}\n")
    assert memory_left(tmp_path) == 52 * MIB, "what is cached of files can be taken"
    put(tmp_path, f"{V2}/memory.max", "max\n")
    assert memory_left(tmp_path) is None
    put(tmp_path, f"{V2}/memory.oom.group", "1\n")
    assert die_together(tmp_path)
