import httpx2
import pytest
from huggingface_hub.errors import (
    FileMetadataError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)

from bake.errors import BakeError, HubUnreachableError, VerificationError
from bake.fingerprint import Fingerprint
from bake.hub import Advertised, _one_sentence, advertised_faults, conflicts
from bake.lock import LockedFile


def response(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("GET", "http://hub.invalid/x"))


@pytest.mark.parametrize(
    ("raised", "expected", "said"),
    [
        # C14: a builtin ConnectionError, which handlers of HTTP errors miss.
        (OfflineModeIsEnabled("offline"), HubUnreachableError, "--from-dir"),
        (httpx2.ConnectError("refused"), HubUnreachableError, "stand-in"),
        (httpx2.ConnectTimeout("slow"), HubUnreachableError, "HF_ENDPOINT"),
        (httpx2.RemoteProtocolError("peer closed"), HubUnreachableError, "went away"),
        (LocalEntryNotFoundError("nothing cached"), HubUnreachableError, "cannot be reached"),
        (HfHubHTTPError("busy", response=response(503)), HubUnreachableError, "status 503"),
        (HfHubHTTPError("slow down", response=response(429)), HubUnreachableError, "status 429"),
        (HfHubHTTPError("forbidden", response=response(403)), BakeError, "refused"),
        (RevisionNotFoundError("no revision", response=response(404)), BakeError, "no such thing"),
        (FileMetadataError("no commit header"), BakeError, "does not answer as a model hub"),
        (ValueError("Expecting value"), BakeError, "does not answer as a model hub"),
        (OSError(28, "No space left on device"), BakeError, "No space left"),
        (OSError("Consistency check failed: file should be of size 2 (x)"), VerificationError, "ended early"),
    ],
)
def test_whatever_the_client_raises_becomes_one_sentence(
    raised: Exception, expected: type[BakeError], said: str
) -> None:
    with pytest.raises(BakeError) as caught, _one_sentence("example/mini at r"):
        raise raised
    assert type(caught.value) is expected
    assert said in str(caught.value)
    assert "example/mini at r" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_pinned_and_what_is_advertised() -> None:
    file = LockedFile(path="m", size=2, sha256="0" * 64)
    assert conflicts(file, Advertised(size=2, sha256="0" * 64, blob_id=None)) == []
    assert conflicts(file, Advertised(size=None, sha256=None, blob_id="b")) == []
    assert conflicts(LockedFile(path="m"), Advertised(size=3, sha256="1" * 64, blob_id=None)) == []
    assert len(conflicts(file, Advertised(size=3, sha256="1" * 64, blob_id=None))) == 2


def test_what_is_advertised_and_what_arrived() -> None:
    seen = Fingerprint(size=2, sha256="0" * 64, blob_id="b")
    assert advertised_faults("m", seen, Advertised(size=2, sha256=None, blob_id="b")) == []
    assert advertised_faults("m", seen, Advertised(size=2, sha256=None, blob_id="c")) == [
        "m: git blob b, the hub says c"
    ]
    assert advertised_faults("m", seen, Advertised(size=3, sha256=None, blob_id="c")) == ["m: 2 bytes, the hub says 3"]
