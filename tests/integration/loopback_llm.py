"""An LLM on loopback: as much of OpenAI's chat completions as hindsight-api uses, with answers made of what it is asked."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-a-key-that-nobody-else-may-see"
MARK = "It is known that"
OBSERVED = "As was seen,"
SEARCHES = ("search_mental_models", "search_observations", "recall")


@dataclass
class Llm:
    """What it was asked, and how it behaves.

    Attributes:
        requests: the body of every request, with its `authorization` header.
        silent: while set, it takes requests and answers none.

    """

    requests: list[dict[str, Any]] = field(default_factory=list)
    silent: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    url: str = ""


def variables(llm: Llm) -> dict[str, str]:
    """Return the settings of a sidecar whose LLM this is."""
    return {
        "HINDSIGHT_API_LLM_PROVIDER": "openai",
        "HINDSIGHT_API_LLM_BASE_URL": llm.url,
        "HINDSIGHT_API_LLM_API_KEY": KEY,
        "HINDSIGHT_API_LLM_MODEL": "a-model",
    }


def facts_of(text: str) -> list[dict[str, Any]]:
    """Return one fact for each sentence of a text, in words that only we use."""
    return [
        {
            "what": f"{MARK} {sentence}",
            "when": "N/A",
            "where": "N/A",
            "who": "N/A",
            "why": "N/A",
            "fact_kind": "conversation",
            "fact_type": "world",
            "entities": re.findall(r"\b[A-Z][a-z]+\b", sentence)[:1],
        }
        for sentence in re.split(r"(?<=\.)\s+", text.strip())
    ]


def observations_of(facts: str) -> list[dict[str, Any]]:
    """Return one observation for each of the numbered facts that are to be consolidated."""
    found = re.findall(r"^\[([0-9a-f-]{36})\] (.*?)(?: \(mentioned_at=.*)?$", facts, re.MULTILINE)
    return [{"text": text.replace(MARK, OBSERVED), "source_fact_ids": [fact]} for fact, text in found]


def answer_to(body: dict[str, Any]) -> dict[str, Any]:
    """Return the assistant's message."""
    messages = body["messages"]
    asked = messages[-1]["content"]
    if body.get("tools"):
        return _tool_call(body["tools"], messages)
    content: str | dict[str, Any] = "ok"
    if found := re.search(r"\nContent:\n(.*)\Z", asked, re.DOTALL):
        content = {"facts": facts_of(found[1])}
    elif found := re.search(r"\n### New facts\n(.*)\n### Existing observations", asked, re.DOTALL):
        content = {"creates": observations_of(found[1]), "updates": [], "deletes": []}
    return {"role": "assistant", "content": content if isinstance(content, str) else json.dumps(content)}


def _tool_call(tools: list[dict[str, Any]], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Use every tool that searches once, and then answer with what they found."""
    used = {call["function"]["name"] for message in messages for call in message.get("tool_calls") or []}
    offered = [tool["function"]["name"] for tool in tools]
    name = next((name for name in offered if name in SEARCHES and name not in used), "done")
    arguments: dict[str, Any] = {"reason": "it was asked for", "query": messages[1]["content"]}
    if name == "done":
        seen = "\n".join(str(message["content"]) for message in messages if message["role"] == "tool")
        texts = sorted(set(re.findall(rf"{MARK}[^\"|\\]*", seen)))
        arguments = {"answer": f"I found this: {' '.join(texts)}", "answer_found": True}
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call-{len(messages)}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    llm: Llm

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.llm.requests.append({**body, "authorization": self.headers.get("authorization")})
        self.llm.asked.set()
        if self.llm.silent.is_set():
            self.llm.ended.wait()
            self.close_connection = True
            return
        if self.path != "/v1/chat/completions":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        message = answer_to(body)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        content = json.dumps(
            {
                "id": f"chatcmpl-{len(self.llm.requests)}",
                "object": "chat.completion",
                "created": 1_700_000_000,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
                "usage": {"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 20},
            }
        ).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that went away is what a stop looks like."""


@contextmanager
def serving() -> Iterator[Llm]:
    """Have an LLM for as long as the context lasts."""
    llm = Llm()
    with Server(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"llm": llm})) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        llm.url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield llm
        finally:
            llm.ended.set()
            server.shutdown()
            thread.join()
