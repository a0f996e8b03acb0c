"""Our hindsight-api: its process, what is seen of it, and the proof that it gives memories back."""

import asyncio
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

import httpx2
import psycopg

from sidecar import api_environment, database, log, processes, rehearsal, sizing, upstream
from sidecar.child import Child
from sidecar.component import Component
from sidecar.errors import TransientError
from sidecar.initscripts import InitScripts
from sidecar.model import Model
from sidecar.settings import Settings
from sidecar.tenant import Tenant
from sidecar.threads import off_loop
from sidecar.watch import TIMEOUT, ApiWatch

_CALL_TIMEOUT = 30.0  # seconds for one call of ours
_STOP_PATIENCE = 5.0  # seconds from SIGTERM to SIGKILL
_SWEEPS = 10  # looks, a second apart, for traces that our own bank left
_OOM_SCORE = 500  # of 1000: short of memory, the kernel takes hindsight-api rather than the database
_OOM_MORE = 100  # than our own, which Kubernetes sets above that, and nobody without privileges may go below
_OOM_MAX = 1000


def _oom_score() -> int:
    own = int(Path("/proc/self/oom_score_adj").read_text(encoding="ascii"))
    return min(max(_OOM_SCORE, own + _OOM_MORE), _OOM_MAX)


class HindsightApi(Component[ApiWatch]):
    """The installed hindsight-api, and the process of it that runs.

    Attributes:
        installed: what is installed.

    """

    def __init__(
        self,
        settings: Settings,
        installed: upstream.Upstream,
        scripts: InitScripts,
        identity: Mapping[str, str],
        environ: Mapping[str, str],
        tenant: Tenant,
        answered: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        """`answered` returns the monotonic seconds of its last answer to a memory call."""
        self._client = httpx2.AsyncClient(
            base_url=f"http://{settings.api_listen}",
            auth=tenant.sign,
            limits=httpx2.Limits(max_keepalive_connections=0),
            timeout=httpx2.Timeout(_CALL_TIMEOUT, connect=TIMEOUT),
            trust_env=False,
        )
        super().__init__(ApiWatch(self._client, self._at_work, self._not_there, changed))
        self.installed = installed
        self._settings = settings
        self._scripts = scripts
        self._identity = identity
        self._environ = environ
        self._tenant = tenant
        self._log = log.get("hindsight-api")
        self._sweeping: asyncio.Task[None] | None = None
        self._hung: Child | None = None
        self._answered = answered
        self._work: processes.AtWork | None = None
        self._listens: int | None = None  # the process that was found to do so

    def _at_work(self) -> float:
        """Return the monotonic seconds at which it last answered somebody, or was seen to use a core."""
        return self._answered() if self._work is None else max(self._answered(), self._work.seen())

    async def _not_there(self) -> str | None:
        """Say why it cannot be asked for anything now, None where it is the one who listens."""
        address, pid = self._settings.api_listen, None if self.child is None else self.child.pid
        if pid is not None and pid == self._listens:  # it keeps its port until it ends, which is told a moment later
            found = processes.member(pid)
            return "it has ended" if found is None or found.ending else None
        who = processes.Listener.NOBODY if pid is None else await off_loop(processes.listener, address.port, pid)
        if who is processes.Listener.ANOTHER:
            return (
                f"another program listens on port {address.port}, and hindsight-api does not yet; end it, or set "
                "HINDSIGHT_SIDECAR_API_LISTEN to a free address"
            )
        if who is processes.Listener.NOBODY:
            return f"it does not listen on {address} yet"
        if who is processes.Listener.UNKNOWN:
            self._log.warning("it cannot be told who listens on the address of hindsight-api", address=str(address))
        self._listens = pid
        return None

    async def start(self, model: Model) -> None:
        """Start it with this model and begin to watch it; cancelled while its environment is made, nothing was started."""
        # The key is for this process alone.
        environment = {**await off_loop(self._environment, model), **self._tenant.renew()}
        child = self._scripts.start("30-hindsight-api", "hindsight-api", environment, signal.SIGKILL)
        try:
            Path(f"/proc/{child.pid}/oom_score_adj").write_text(str(_oom_score()), encoding="ascii")
        except OSError as error:  # it serves all the same
            self._log.warning("the kernel may take Postgres first where memory is short", error=str(error))
        self._listens = None
        self._work = processes.AtWork(child.pid)
        self.watch.process = child.pid
        self._begin(child)

    def _environment(self, model: Model) -> dict[str, str]:
        # Off the loop: it reads the reranker's manifest, and hindsight-api's sources where there are names to compare with them.
        return api_environment.build(
            self._settings, model, self.installed, sizing.this_machine(), self._environ, self._identity
        )

    async def similarities(self, model: Model, stored: list[tuple[str, list[float]]]) -> list[float]:
        """Return how much vectors agree with fresh ones of their texts, as cosines; in a process of its own.

        Raises:
            TransientError: the model could not be loaded there, or the container might be ended for it.

        """
        self._check_memory()
        settings, machine = self._settings, sizing.this_machine()
        environment = api_environment.for_embedding(
            settings, model, self.installed, machine, self._environ, self._identity
        )
        scratch, empty = settings.run_dir / "scratch", settings.run_dir / "empty"
        return await upstream.similarities(self.installed, stored, environment, scratch, empty)

    def _check_memory(self) -> None:
        """Refuse where a second model may be one too many, and all would go with it. Raises TransientError."""
        left = sizing.memory_left()
        if self.child is None or left is None or not sizing.die_together():
            return
        wanted = processes.memory(self.child.pid)
        if left < wanted:
            raise TransientError(
                f"hindsight-api has {wanted // sizing.MIB} MiB, {left // sizing.MIB} MiB are left for its model a second time, and "
                "the container would be ended for want of memory"
            )

    def stop_watching(self) -> None:
        """Look no more."""
        super().stop_watching()
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None

    async def stop(self) -> None:
        """Stop it in order, or hard where it does not leave: with an LLM call outstanding it takes half a minute."""
        if self.child is not None:
            self.child.send(signal.SIGTERM)
            if await self.child.wait(_STOP_PATIENCE) is None:
                self.child.send(signal.SIGKILL)
                await self.child.wait(TIMEOUT)

    async def replace(self) -> None:
        """Kill a process that hangs; the next start takes its tasks up again."""
        self._hung = self.child
        if self.child is not None:
            self._log.warning("replacing a hung hindsight-api", pid=self.child.pid, limit=self._settings.api_hung_after)
            self.child.send(signal.SIGKILL)
            await self.child.wait(TIMEOUT)

    def was_hung(self, child: Child) -> bool:
        """Tell whether this process was killed by us, since it hung."""
        return child is self._hung

    async def prove(self) -> None:
        """Store a memory and recall it by its meaning.

        Raises:
            RehearsalError: it did not come back.

        """
        score = await rehearsal.prove(self._client)
        self._log.info("a memory was stored and recalled by its meaning", semantic=round(score, 3))
        self._sweeping = asyncio.create_task(self._sweep())

    async def recall(self, bank: str, text: str) -> float | None:
        """Ask a bank for a memory by its own text, and return its semantic score; None where it did not come back.

        Raises:
            RehearsalError: hindsight-api did not answer as it should.

        """
        found = await rehearsal.Agent(self._client, quote(bank, safe="")).recall(text)
        return rehearsal.semantic_score(found, text)

    async def version_body(self) -> dict[str, object] | None:
        """Return the body of its `/version`, None where it gives none."""
        response = await self._client.get("/version")
        body: dict[str, object] | None = response.json() if response.is_success else None
        return body

    async def _sweep(self) -> None:
        """Delete the traces that our own bank leaves; hindsight-api writes them some time after the call."""
        quiet = 0
        for _ in range(_SWEEPS):
            await asyncio.sleep(1)
            try:
                async with await database.connect(self._settings.run_dir) as connection:
                    deleted = await database.sweep_traces(connection, rehearsal.CANARY_BANK)
            except (psycopg.Error, OSError) as error:
                self._log.warning("traces of our own bank were not swept", error=str(error).strip())
                return
            quiet = 0 if deleted else quiet + 1
            if quiet >= 2:  # noqa: PLR2004 - nothing came for two seconds
                return

    async def close(self) -> None:
        """Close what is open towards it."""
        await self._client.aclose()
