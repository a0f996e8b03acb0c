"""The model hub, through its own client: what it advertises for a commit, and the download.

HF_ENDPOINT and HF_TOKEN are the client's own settings and are left to it.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    FileMetadataError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from bake.errors import BakeError, HubUnreachableError, VerificationError
from bake.fingerprint import Fingerprint, differences
from bake.lock import LockedFile

ASK_TIMEOUT = 20.0  # seconds for the file list
TRY_LATER = frozenset({408, 429})


@dataclass(frozen=True)
class Advertised:
    """What the hub says of one file: bytes, and sha256 (LFS) or git's blob id (everything else)."""

    size: int | None
    sha256: str | None
    blob_id: str | None


def advertised(repo: str, revision: str) -> dict[str, Advertised]:
    """Ask for the files of a commit. Raises HubUnreachableError, VerificationError or BakeError."""
    with _one_sentence(f"the file list of {repo} at {revision}"):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=ASK_TIMEOUT)
        if info.sha != revision:
            raise VerificationError([f"{repo}: the hub answers with revision {info.sha}, the lock pins {revision}"])
        return {
            file.rfilename: Advertised(
                size=file.size,
                sha256=file.lfs.sha256 if file.lfs else None,
                blob_id=None if file.lfs else file.blob_id,
            )
            for file in info.siblings or ()
        }


def download(repo: str, revision: str, paths: Collection[str], into: Path) -> None:
    """Fetch exactly ``paths`` into a plain directory; files that are complete there already are kept.

    Raises HubUnreachableError, also when it went away in the middle; VerificationError for a file that ends early.
    """
    with _one_sentence(f"{repo} at {revision}"):
        snapshot_download(
            repo,
            revision=revision,
            local_dir=into,
            # Its own cache is not consulted either: a file from there would not come from this endpoint.
            cache_dir=into / ".cache" / "unused",
            allow_patterns=list(paths),
        )


def conflicts(file: LockedFile, offer: Advertised) -> list[str]:
    """Where the hub advertises another file than the lock pins; told before anything is downloaded."""
    faults = []
    if None not in (file.size, offer.size) and file.size != offer.size:
        faults.append(f"{file.path}: the hub advertises {offer.size} bytes, the lock says {file.size}")
    if None not in (file.sha256, offer.sha256) and file.sha256 != offer.sha256:
        faults.append(f"{file.path}: the hub advertises sha256 {offer.sha256}, the lock says {file.sha256}")
    return faults


def advertised_faults(path: str, seen: Fingerprint, offer: Advertised) -> list[str]:
    """Where a downloaded file is not the one the hub advertised."""
    faults = differences(path, seen, size=offer.size, sha256=offer.sha256, by="the hub")
    if not faults and offer.blob_id is not None and seen.blob_id != offer.blob_id:
        faults = [f"{path}: git blob {seen.blob_id}, the hub says {offer.blob_id}"]
    return faults


@contextmanager
def _one_sentence(what: str) -> Iterator[None]:
    """Turn whatever the client raises into one of ours. C14: its offline error is a builtin ConnectionError."""
    asked = f"tried to get {what} from {constants.ENDPOINT}"
    what_now = (
        "set HF_ENDPOINT to a hub that can be reached from here, or give the files with --from-dir, "
        "or ask for the stand-in all-MiniLM-L6-v2 by name"
    )
    try:
        yield
    except (httpx2.ReadError, httpx2.RemoteProtocolError) as error:
        raise HubUnreachableError(
            f"the model hub went away while we {asked} ({_cause(error)}); what is complete is kept, run this again"
        ) from error
    except (OfflineModeIsEnabled, httpx2.TransportError, LocalEntryNotFoundError) as error:
        raise HubUnreachableError(f"the model hub cannot be reached: {asked} ({_cause(error)}); {what_now}") from error
    except (RepositoryNotFoundError, RevisionNotFoundError, RemoteEntryNotFoundError) as error:
        raise BakeError(f"{asked}, which has no such thing, or not for us ({_cause(error)})") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in TRY_LATER or status >= httpx2.codes.INTERNAL_SERVER_ERROR:
            raise HubUnreachableError(
                f"the model hub is of no use now: {asked} (status {status}); {what_now}"
            ) from error
        raise BakeError(f"{asked}, which refused ({_cause(error)})") from error
    except FileMetadataError as error:
        raise BakeError(f"{asked}, which does not answer as a model hub does ({_cause(error)})") from error
    except OSError as error:
        if "Consistency check failed" in str(error):
            raise VerificationError([f"{asked}, and a file ended early: {_cause(error)}"]) from error
        raise BakeError(f"{asked}: {_cause(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        # A captive portal's page, for example, where the client expects JSON.
        raise BakeError(f"{asked}, which does not answer as a model hub does ({_cause(error)})") from error


def _cause(error: BaseException) -> str:
    """First line of the innermost explanation."""
    while error.__cause__ is not None:
        error = error.__cause__
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
