import asyncio
from pathlib import Path

import httpx2
import pytest

from sidecar import smoking


@pytest.mark.parametrize(
    ("environ", "sent"),
    [
        ({}, None),
        ({"HINDSIGHT_SIDECAR_API_KEY": "a", "HINDSIGHT_API_TENANT_API_KEY": "b"}, "Bearer a"),
        ({"HINDSIGHT_API_TENANT_API_KEY": "b"}, "Bearer b"),
        ({"HINDSIGHT_SIDECAR_API_KEY_FILE": "key", "HINDSIGHT_API_TENANT_API_KEY": "b"}, "Bearer from-file"),
    ],
)
def test_the_key_is_the_one_that_the_gateway_demands(
    environ: dict[str, str], sent: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("from-file\n")
    monkeypatch.chdir(tmp_path)
    seen: list[str | None] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.headers.get("authorization"))
        return httpx2.Response(401, text="no")

    client = httpx2.AsyncClient
    monkeypatch.setattr(
        smoking.httpx2, "AsyncClient", lambda **options: client(transport=httpx2.MockTransport(answer), **options)
    )
    report = asyncio.run(smoking.smoke("http://gateway", "bank", environ, local=False))
    assert seen == [sent]
    assert report.fault is not None
    assert "answered 401" in report.fault
