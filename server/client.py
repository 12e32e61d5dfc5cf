"""An async client of the native WebSocket: connect, chat, cancel, and going on by itself after a lost connection.

    async with Client("ws://127.0.0.1:8000/v1/ws") as client:
        answer = await client.chat([{"role": "user", "content": "Hello"}], max_tokens=200)
        async for delta in answer:
            print(delta["text"], end="", flush=True)
        print((await answer.result())["finish_reason"])

Knows the protocol's messages as plain dicts; refuses to know terminals, tokens and models. Needs only `websockets`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

FIRST_PAUSE = 0.25  # seconds before the first new attempt; doubles each time
LONGEST_PAUSE = 8.0
PATIENCE = 120.0  # seconds an answer waits for a lost connection; the server keeps it about as long
REFUSED = frozenset({1008, 4401, 4408})  # close codes after which trying again cannot help
TOO_BIG = 1009  # sending the same again would be closed again
MAX_FRAME_BYTES = 2**24  # a snapshot holds a whole answer
NOTICES = 100  # kept

Message = dict[str, Any]
State = Literal["open", "lost", "refused"]


class ClientError(Exception):
    """The server refused or ended something, or cannot be reached. `code` is the server's error code, or one of ours:
    bad_url, unreachable, refused, disconnected, message_too_big, closed. `param` is the field at fault."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Answer:
    """One answer being streamed: an async iterator of `delta` messages, to be iterated once. After a long absence it also gives
    a `snapshot`, whose `text` is the whole answer so far. `text` is what has arrived; `response_id` and `seq` are what
    `Client.resume` needs to go on from anywhere."""

    def __init__(self, client: Client, request: Message, response_id: str | None = None, seq: int = -1) -> None:
        self.request = request  # asks for this answer, until it has a response_id
        self.id: str = request["id"]
        self.response_id = response_id
        self.seq = seq
        self.text = ""
        self.started: Message | None = None
        self.cancelled = False
        self._client = client
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue()
        self._done: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._done.add_done_callback(lambda future: future.cancelled() or future.exception())  # iterating alone is fine too

    async def __aiter__(self) -> AsyncIterator[Message]:
        while (message := await self._queue.get()) is not None:
            yield message
        await self._done

    async def result(self) -> Message:
        """The final `done` message. Raises ClientError when the answer ended in an error."""
        return await asyncio.shield(self._done)

    async def read(self) -> str:
        """The whole text, once it is there. Raises ClientError."""
        await self.result()
        return self.text

    async def cancel(self) -> None:
        """Ask the server to stop; the answer then ends with finish_reason "cancelled"."""
        if not self._done.done() and not self.cancelled:
            self.cancelled = True
            await self._client.stop(self)

    def take(self, message: Message) -> bool:
        """Take one message of this answer; True when it was the last."""
        seq, kind = message.get("seq"), message["type"]
        if seq is not None:
            if seq <= self.seq and kind != "snapshot":
                return False  # replayed twice
            self.seq = seq
        if kind == "started":
            self.started, self.response_id = message, message["response_id"]
        elif kind in ("delta", "snapshot"):
            self.text = message["text"] if kind == "snapshot" else self.text + message["text"]
            self._queue.put_nowait(message)
        elif kind == "done":
            self.finish(message)
        elif kind == "error":
            self.fail(ClientError(message["code"], message["message"], message.get("param")))
        return self._done.done()

    def finish(self, done: Message) -> None:
        if not self._done.done():
            self._done.set_result(done)
            self._queue.put_nowait(None)

    def fail(self, error: ClientError) -> None:
        if not self._done.done():
            self._done.set_exception(error)
            self._queue.put_nowait(None)


class Client:
    """`hello` is the server's greeting (version, model, limits), `notices` the last of what it told everybody.

    `on_state` is called with "lost" and why when the connection is gone, "open" when it is back, "refused" when the client has
    given up. `patience` is how many seconds an answer waits for a lost connection.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        patience: float = PATIENCE,
        on_state: Callable[[State, str], None] = lambda state, why: None,
    ) -> None:
        self.url = url
        self.hello: Message = {}
        self.notices: deque[Message] = deque(maxlen=NOTICES)
        self._key = key
        self._patience = patience
        self._on_state = on_state
        self._answers: dict[str, Answer] = {}
        self._ids = (f"c{n}" for n in itertools.count(1))
        self._socket: ClientConnection | None = None  # None while there is no connection
        self._reader: asyncio.Task[None] | None = None
        self._ended: ClientError | None = None  # why this client will never connect again

    async def __aenter__(self) -> Client:
        """Connect once; raises ClientError when the server cannot be reached or refuses."""
        self._socket = await self._connect()
        self._reader = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        if self._socket is not None:
            await self._socket.close()
        self._end(ClientError("closed", "this client was closed"))

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Answer:
        """Start an answer. `options` are fields of the `chat` message: temperature, max_tokens, seed, speculation, ..."""
        request = {"type": "chat", "id": next(self._ids), "messages": list(messages), "resumable": True, **options}
        return await self._add(Answer(self, request))

    async def resume(self, response_id: str, after_seq: int = -1) -> Answer:
        """Go on with an answer of another client or process: its response_id and the number of the last message that arrived."""
        return await self._add(Answer(self, {"id": next(self._ids)}, response_id, after_seq))

    async def stop(self, answer: Answer) -> None:
        """Tell the server that an answer is not wanted any more; Answer.cancel calls this."""
        if self._socket is not None:
            await self._send({"type": "cancel", "id": answer.id})
        elif answer.response_id is None:  # never asked
            self._answers.pop(answer.id, None)
            answer.finish({"type": "done", "id": answer.id, "finish_reason": "cancelled"})
        # else it is cancelled once there is a connection again

    # ---- asking

    async def _add(self, answer: Answer) -> Answer:
        if self._ended is not None:
            raise self._ended
        self._answers[answer.id] = answer
        if self._socket is not None:
            await self._ask(answer)
        return answer

    async def _ask(self, answer: Answer) -> None:
        """Send what begins an answer, or what goes on with it on this connection."""
        message = answer.request
        if answer.response_id is not None:
            message = {"type": "resume", "id": answer.id, "response_id": answer.response_id, "after_seq": answer.seq}
        try:
            await self._send(message)
        except ClientError as error:
            del self._answers[answer.id]
            answer.fail(error)
            return
        if answer.cancelled:
            await self._send({"type": "cancel", "id": answer.id})

    async def _send(self, message: Message) -> None:
        """On a connection that is just being lost nothing is sent: `_run` sees to what was meant. Raises ClientError."""
        data = json.dumps(message)
        limit = self.hello.get("limits", {}).get("message_bytes")
        if limit is not None and len(data) > limit:  # json.dumps writes ASCII: characters are bytes
            raise ClientError("message_too_big", f"the request has {len(data)} bytes; the server takes {limit}", "messages")
        if self._socket is not None:
            with contextlib.suppress(ConnectionClosed):
                await self._socket.send(data)

    # ---- the connection

    async def _connect(self) -> ClientConnection:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else None
        try:
            host = urlsplit(self.url).hostname
            socket = await connect(
                self.url, additional_headers=headers, subprotocols=[Subprotocol("forespeak.v1.json")], max_size=MAX_FRAME_BYTES,
                proxy=None if host in ("localhost", "127.0.0.1", "::1") else True,
            )  # fmt: skip
            if self._key is None:
                await socket.send('{"type":"ping"}')  # a server that wants a key says so now, not when its patience ends
            self.hello = json.loads(await socket.recv())
        except (InvalidURI, ValueError) as error:
            raise ClientError("bad_url", f"{self.url} is not the address of a WebSocket (ws://HOST:PORT/v1/ws)") from error
        except InvalidStatus as error:
            status, why = error.response.status_code, _message_of(error.response.body)
            kind = "refused" if status in (401, 403, 404) else "unreachable"
            raise ClientError(kind, f"{self.url} refused the connection: {why or f'HTTP {status}'}") from error
        except (OSError, InvalidHandshake, TimeoutError) as error:
            raise ClientError("unreachable", f"cannot connect to {self.url}: {error}; is `forespeak serve` running?") from error
        except ConnectionClosed as error:
            code, why = _closing(error)
            if code == 4401 and self._key is None:
                why = "it needs an API key"
            kind = "refused" if code in REFUSED else "unreachable"
            raise ClientError(kind, f"{self.url} refused the connection: {why}") from error
        return socket

    async def _run(self) -> None:
        """Read, and connect anew whenever the connection is lost, until the server refuses."""
        try:
            while True:
                code, why = await self._read()
                self._socket = None
                if code == TOO_BIG:
                    self._fail(ClientError("message_too_big", why), lambda answer: answer.response_id is None)
                if code in REFUSED:
                    raise ClientError("refused", f"the server closed the connection: {why}")
                self._on_state("lost", why)
                self._socket = await self._reconnect()
                for answer in list(self._answers.values()):
                    await self._ask(answer)
                self._on_state("open", "")
        except ClientError as error:
            self._end(error)
            self._on_state("refused", str(error))
        except Exception as error:  # a server that does not speak the protocol must not leave answers waiting for ever
            self._end(ClientError("disconnected", f"the connection failed: {error}"))
            raise

    async def _read(self) -> tuple[int, str]:
        """Hand messages to their answers until the connection ends; returns its close code and reason."""
        assert self._socket is not None
        try:
            while True:
                message = json.loads(await self._socket.recv())
                if message["type"] == "notice":
                    self.notices.append(message)
                answer = self._answers.get(message.get("id", ""))
                if answer is not None and answer.take(message):
                    del self._answers[answer.id]
        except ConnectionClosed as error:
            return _closing(error)

    async def _reconnect(self) -> ClientConnection:
        """Try at growing distances. Raises ClientError when the server refuses."""
        lost, pause = time.monotonic(), FIRST_PAUSE
        while True:
            await asyncio.sleep(pause * (0.5 + random.random()))
            pause = min(2 * pause, LONGEST_PAUSE)
            try:
                return await self._connect()
            except ClientError as error:
                if error.code == "refused":
                    raise
                if time.monotonic() - lost > self._patience:
                    self._fail(ClientError("disconnected", f"the connection was lost and did not come back: {error}"))

    def _fail(self, error: ClientError, which: Callable[[Answer], bool] = lambda answer: True) -> None:
        for answer in [answer for answer in self._answers.values() if which(answer)]:
            del self._answers[answer.id]
            answer.fail(error)

    def _end(self, error: ClientError) -> None:
        self._socket = None
        self._ended = self._ended or error
        self._fail(error)


def _closing(error: ConnectionClosed) -> tuple[int, str]:
    """Close code and reason; 1006 when the peer said none."""
    if error.rcvd is None:
        return 1006, "the connection broke"
    return error.rcvd.code, error.rcvd.reason or f"code {error.rcvd.code}"


def _message_of(body: bytes | bytearray | memoryview | None) -> str:
    """The message of an error body {"error": {"message": ...}}, empty when it is not one."""
    try:
        return str(json.loads(bytes(body or b""))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
