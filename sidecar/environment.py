"""The environment that settings come from: what is ours, what is Kubernetes' noise, what is a mistake."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PREFIX = "HINDSIGHT_SIDECAR_"
API_PREFIX = "HINDSIGHT_API_"
DATABASE_ENDINGS = ("DATABASE_URL", "DB_URL")

# A Service called `hindsight-api` or `hindsight-sidecar` makes Kubernetes set these in every pod of its namespace.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_[A-Z0-9_]+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_LINK_URL = re.compile(r"^(tcp|udp|sctp)://", re.IGNORECASE)


def is_service_link(name: str, value: str) -> bool:
    """Tell whether Kubernetes set this variable for a Service, rather than a person for us."""
    if not name.startswith((PREFIX, API_PREFIX)):
        return False
    return bool(_SERVICE_LINK.search(name)) or (name.endswith("_PORT") and bool(_LINK_URL.match(value)))


@dataclass(frozen=True)
class Sorted:
    """An environment, sorted.

    Attributes:
        kept: every variable but the service links.
        links: names of the service links that were dropped.
        faults: one sentence for each name that cannot be meant.

    """

    kept: dict[str, str]
    links: list[str]
    faults: list[str]


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that was probably meant; the prefixes that all share do not count as likeness."""
    shared = next((prefix for prefix in (PREFIX, API_PREFIX) if name.startswith(prefix)), "")
    rests = [other.removeprefix(shared) for other in known if other.startswith(shared)]
    close = difflib.get_close_matches(name.removeprefix(shared), rests, n=1, cutoff=cutoff)
    return shared + close[0] if close else None


def sort(environ: Mapping[str, str], known: Iterable[str], secrets: Iterable[str]) -> Sorted:
    """Sort an environment into what is used, what is dropped and what is a mistake.

    `known` are the names of our settings with their prefix, `secrets` those that may also come as `*_FILE`.
    """
    names = [*known, *(f"{secret}_FILE" for secret in secrets)]
    links = sorted(name for name, value in environ.items() if is_service_link(name, value))
    kept = {name: value for name, value in environ.items() if name not in links}
    faults = [
        f"{name} is not a setting of the sidecar; "
        + (f"did you mean {close}?" if (close := nearest(name, names)) else "docs/settings.md lists them")
        for name in sorted(kept)
        if name.startswith(PREFIX) and name not in names
    ]
    faults += [
        f"{secret} and {secret}_FILE are both set; set one of them"
        for secret in secrets
        if secret in kept and f"{secret}_FILE" in kept
    ]
    # A mis-spelt database setting must never end in a silent fallback to another database.
    faults += [
        f"{name} is set, and the sidecar brings its own database; unset it"
        for name in sorted(kept)
        if name.startswith("HINDSIGHT_") and not name.startswith(API_PREFIX) and name.endswith(DATABASE_ENDINGS)
    ]
    if "HINDSIGHT_PGDATA" in kept and "PGDATA" not in kept:
        faults.append(
            f"HINDSIGHT_PGDATA is set to {kept['HINDSIGHT_PGDATA']}, and the sidecar reads PGDATA; "
            "rename the variable (the same directory can be adopted)"
        )
    return Sorted(kept, links, faults)
