"""How big things may be: Postgres' settings from the memory limit and the cores."""

import os
from dataclasses import dataclass
from pathlib import Path

MIB = 1024**2
GIB = 1024**3

# hindsight-api's own default is 100, Postgres' default max_connections: both at once leave none for us.
API_POOL = 20
_OWN_CONNECTIONS = 12  # sampler, migrations, dump workers, a person with psql
# hindsight makes three partial indexes a bank: at Postgres' default some 2,100 banks exhaust the lock table.
_LOCKS_PER_TRANSACTION = 1024


@dataclass(frozen=True)
class Machine:
    """What this process may use.

    Attributes:
        memory: bytes, the smaller of the machine's and the cgroup's.
        cores: at least 1, the cgroup's quota rounded up where it is smaller than the machine.

    """

    memory: int
    cores: int


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").split()[0]
    except (OSError, IndexError):
        return None
    return int(text) if text.isdigit() else None


def memory_limit(root: Path = Path("/")) -> int:
    """Return how many bytes of memory this process may use: both cgroup versions and the machine are asked."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (
        _read_int(root / "sys/fs/cgroup/memory.max"),
        _read_int(root / "sys/fs/cgroup/memory/memory.limit_in_bytes"),
    )
    return min([total, *(limit for limit in limits if limit)])


def die_together(root: Path = Path("/")) -> bool:
    """Tell whether the kernel, short of memory, ends every process of the container and not one (as Kubernetes has it)."""
    return _read_int(root / "sys/fs/cgroup/memory.oom.group") == 1


def memory_left(root: Path = Path("/")) -> int | None:
    """Return how many bytes can still be taken before the container's limit; None where it has none."""
    limit, used = _read_int(root / "sys/fs/cgroup/memory.max"), _read_int(root / "sys/fs/cgroup/memory.current")
    if limit is None or used is None:
        return None
    try:
        lines = (root / "sys/fs/cgroup/memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    cached = sum(int(line.split()[1]) for line in lines if line.split()[0] in {"inactive_file", "active_file"})
    return max(limit - used + cached, 0)


def core_limit(root: Path = Path("/")) -> int:
    """Return how many cores this process may use, at least 1."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        quota = str(_read_int(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us") or "max")
        period = str(_read_int(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us") or 100_000)
    if quota.isdigit():
        cores = min(cores, max(1, -(-int(quota) // int(period))))
    return cores


def this_machine() -> Machine:
    """Look at the limits of this process."""
    return Machine(memory_limit(), core_limit())


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


def postgres_settings(machine: Machine) -> dict[str, str]:
    """Return the settings that Postgres is started with, over what its own files say.

    hindsight-api takes most of a small container's memory, so Postgres gets a sixteenth of it for its buffers.
    """
    return {
        "unix_socket_permissions": "0700",
        "max_connections": str(API_POOL + _OWN_CONNECTIONS),
        "max_locks_per_transaction": str(_LOCKS_PER_TRANSACTION),
        "shared_buffers": f"{_clamp(machine.memory // 16, 32 * MIB, GIB) // MIB}MB",
        "effective_cache_size": f"{_clamp(machine.memory // 4, 64 * MIB, 16 * GIB) // MIB}MB",
        # An HNSW build that does not fit here takes many times as long.
        "maintenance_work_mem": f"{_clamp(machine.memory // 16, 32 * MIB, 512 * MIB) // MIB}MB",
        "max_parallel_maintenance_workers": str(_clamp(machine.cores - 1, 0, 2)),
        # /dev/shm is 64 MB in a container: with segments there a parallel index build fails, and recall degrades.
        "dynamic_shared_memory_type": "mmap",
        "huge_pages": "off",
        "wal_compression": "on",
        # Bounds how long a crash recovery takes, and how much of a small volume the WAL takes.
        "max_wal_size": "512MB",
        "checkpoint_timeout": "5min",
        # A recovery takes as long as it takes, and tells how far it is.
        "log_startup_progress_interval": "1s",
        "archive_mode": "off",
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "logging_collector": "off",
        "log_destination": "stderr",
        "cluster_name": "hindsight",
    }
