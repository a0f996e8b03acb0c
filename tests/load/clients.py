"""The clients of a load: each stores a memory, asks for it, and begins again, without a pause."""

import random
import resource
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from calls import Address, Answered, Caller

CLIENTS_PER_BANK = 5
_FAULTS_KEPT = 40
_PLACES = ("lamp", "bridge", "harbour", "orchard", "station", "library", "kitchen", "cellar", "tower", "meadow")
_THINGS = ("letter", "key", "coin", "map", "violin", "ladder", "basket", "clock", "ticket", "kettle")
_PEOPLE = ("Ada", "Bela", "Carla", "Dmitri", "Edith", "Farid", "Greta", "Hiro", "Ines", "Jonas")


@dataclass(frozen=True)
class Plan:
    """What the clients do.

    Attributes:
        address: whom they call.
        clients: how many at once; five share a bank.
        begin, end: monotonic seconds; what was sent before the end is waited for.

    """

    address: Address
    clients: int
    begin: float
    end: float

    @property
    def banks(self) -> list[str]:
        """The names of the banks."""
        return [f"load-{number}" for number in range(-(-self.clients // CLIENTS_PER_BANK))]


@dataclass
class Load:
    """What came of it.

    Attributes:
        seconds: for each kind of call that was answered, how long each took.
        busy: calls refused for now (429 or 503 with Retry-After), by what was said.
        faults: what else was not 200, some of them, and in `faulty` how many by status.
        acknowledged: by bank, each text with when it was acknowledged.
        unsaid: by bank, texts of which nobody said whether they were stored.
        missed: memories that did not come back when they were asked for right after they were stored.
        cpu: seconds of this process.

    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"retain": [], "recall": []})
    busy: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    faulty: Counter[str] = field(default_factory=Counter)
    acknowledged: dict[str, list[tuple[str, float]]] = field(default_factory=dict)
    unsaid: dict[str, list[str]] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    cpu: float = 0.0

    def note(self, kind: str, answered: Answered) -> None:
        """Take how a call ended."""
        if answered.status == 200:
            self.seconds[kind].append(answered.seconds)
        elif answered.busy:
            self.busy[f"{kind} {answered.status} {answered.body}"] += 1
        else:
            self.faulty[f"{kind} {answered.status}"] += 1
            if len(self.faults) < _FAULTS_KEPT:
                self.faults.append(f"{kind} {answered.status} after {answered.seconds:.1f} s: {answered.body}")


def run(plan: Plan) -> Load:
    """Have all clients at work from the plan's begin to its end; for a process of its own."""
    load = Load(acknowledged={bank: [] for bank in plan.banks}, unsaid={bank: [] for bank in plan.banks})
    lock = threading.Lock()
    threads = [threading.Thread(target=_client, args=(plan, number, load, lock)) for number in range(plan.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used = resource.getrusage(resource.RUSAGE_SELF)
    load.cpu = used.ru_utime + used.ru_stime
    return load


def _client(plan: Plan, number: int, load: Load, lock: threading.Lock) -> None:
    chance = random.Random(number)
    bank = plan.banks[number // CLIENTS_PER_BANK]
    stored = 0
    time.sleep(max(0.0, plan.begin - time.monotonic()))
    with Caller(plan.address) as caller:

        def insist(kind: str, text: str) -> Answered | None:
            """Call until it is not too busy, as `Retry-After` says; None where the end comes before that."""
            while time.monotonic() < plan.end:
                answered = caller.retain(bank, text) if kind == "retain" else caller.recall(bank, text)
                with lock:
                    load.note(kind, answered)
                if not answered.busy:
                    return answered
                wait = answered.retry_after or 0.0
                time.sleep(min(wait * chance.uniform(1.0, 1.5), max(0.0, plan.end - time.monotonic())))
            return None

        while time.monotonic() < plan.end:
            stored += 1
            text = (
                f"{chance.choice(_PEOPLE)} of house {number} put {chance.choice(_THINGS)} {stored} "
                f"beside {chance.choice(_PLACES)} {chance.randrange(1000)}."
            )
            answered = insist("retain", text)
            if answered is None:
                break
            if answered.status != 200:
                with lock:
                    load.unsaid[bank].append(text)
                continue
            with lock:
                load.acknowledged[bank].append((text, time.monotonic()))
            found = insist("recall", text)
            if found is not None and found.status == 200 and text not in [one["text"] for one in found.body["results"]]:
                with lock:
                    load.missed.append(text)
