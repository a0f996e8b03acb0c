"""`hindsight-sidecar smoke`: the rehearsal through the gateway, as an agent sees it."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import httpx2
import psycopg

from sidecar import database, probe
from sidecar.rehearsal import RehearsalError, Report, UnreachableError
from sidecar.rehearsal import smoke as rehearse

_TIMEOUT = 60.0  # seconds for one call
_SWEEPS = 5


async def smoke(url: str, bank: str, environ: Mapping[str, str], *, local: bool) -> Report:
    """Run the rehearsal against a gateway; with `local`, also remove what hindsight-api's tracing kept of it."""
    key = _key(environ)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    report = Report()
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=_TIMEOUT, trust_env=False) as client:
        try:
            await rehearse(client, bank, report)
        except RehearsalError as error:
            report.fault = str(error)
            report.unreachable = isinstance(error, UnreachableError)
    if local:
        try:
            await _sweep(bank)
        except (psycopg.Error, OSError) as error:
            report.fault = report.fault or f"traces of the bank {bank} were not removed: {error}"
    return report


def _key(environ: Mapping[str, str]) -> str | None:
    path = environ.get("HINDSIGHT_SIDECAR_API_KEY_FILE")
    if path is not None:
        return Path(path).read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
    names = ("HINDSIGHT_SIDECAR_API_KEY", "HINDSIGHT_SIDECAR_TENANT_KEY", "HINDSIGHT_API_TENANT_API_KEY")
    return next((environ[name] for name in names if environ.get(name)), None)


async def _sweep(bank: str) -> None:
    # hindsight-api writes its traces some time after the calls: done once nothing came for two looks.
    quiet = 0
    async with await database.connect(probe.control_socket().parent) as connection:
        for _ in range(_SWEEPS):
            quiet = 0 if await database.sweep_traces(connection, bank) else quiet + 1
            if quiet >= 2:  # noqa: PLR2004
                return
            await asyncio.sleep(1)
