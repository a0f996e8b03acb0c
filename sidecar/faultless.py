"""What is told where an application of ours fails: the trace to the log, and nothing of it to a client."""

from sidecar import log
from sidecar.asgi import App, Message, Receive, Scope, Send, problem, send_json

FAULT = problem(500, "Unexpected fault", "the log of the sidecar has the trace; this is a defect of it")


class Faultless:
    """Serves an application; a fault of it is one log line with its trace, and a problem without any."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._log = log.get("sidecar")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request.

        Raises:
            Exception: half an answer was sent: the server closes the connection on it, so that it looks like no whole one.

        """
        started = ended = False

        async def noting(message: Message) -> None:
            nonlocal started, ended
            started = True
            ended = ended or (message["type"] == "http.response.body" and not message.get("more_body", False))
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            if started and not ended:
                raise
            self._log.exception(
                "a request met an unexpected fault", method=scope.get("method"), path=repr(scope.get("path"))
            )
            if not started and scope["type"] == "http":
                await send_json(send, 500, FAULT, [(b"connection", b"close")], head=scope["method"] == "HEAD")
