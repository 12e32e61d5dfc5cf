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
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.typing import Subprotocol

FIRST_PAUSE = 0.25  # seconds before the first new attempt; doubles each time
LONGEST_PAUSE = 8.0
FINAL_CLOSES = frozenset({1008, 4401, 4408})  # refused: trying again cannot help

Message = dict[str, Any]


class ClientError(Exception):
    """The server refused or ended something. `code` is its error code, `param` the field at fault."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Answer:
    """One answer being streamed: an async iterator of `delta` messages (and `snapshot` ones after a long absence, whose `text`
    is the whole answer so far)."""

    def __init__(self, client: Client, id_: str, request: Message) -> None:
        self.id = id_
        self.request = request
        self.response_id: str | None = None
        self.seq = -1
        self.started: Message | None = None
        self._client = client
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue()
        self._done: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._done.add_done_callback(lambda future: future.cancelled() or future.exception())  # iterating alone is fine too

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._deltas()

    async def _deltas(self) -> AsyncIterator[Message]:
        while (message := await self._queue.get()) is not None:
            yield message
        if (error := self._done.exception()) is not None:
            raise error

    async def result(self) -> Message:
        """The final `done` message. Raises ClientError when the answer ended in an error."""
        return await asyncio.shield(self._done)

    async def cancel(self) -> None:
        """Ask the server to stop; the answer then ends with finish_reason "cancelled"."""
        if not self._done.done():
            await self._client.send({"type": "cancel", "id": self.id})

    def take(self, message: Message) -> bool:
        """Take one message of this answer; True when it was the last."""
        seq = message.get("seq")
        if seq is not None:
            if seq <= self.seq and message["type"] != "snapshot":
                return False  # replayed twice
            self.seq = seq
        kind = message["type"]
        if kind == "started":
            self.started, self.response_id = message, message["response_id"]
        elif kind in ("delta", "snapshot"):
            self._queue.put_nowait(message)
        elif kind == "done":
            self._done.set_result(message)
        elif kind == "error":
            self.fail(ClientError(message["code"], message["message"], message.get("param")))
        if self._done.done():
            self._queue.put_nowait(None)
        return self._done.done()

    def fail(self, error: ClientError) -> None:
        if not self._done.done():
            self._done.set_exception(error)
            self._queue.put_nowait(None)


class Client:
    """`hello` is the server's greeting (version, model, limits). `notices` collects its notices, newest last."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        self.hello: Message = {}
        self.notices: list[Message] = []
        self._key = key
        self._answers: dict[str, Answer] = {}
        self._ids = (f"c{n}" for n in itertools.count(1))
        self._socket: ClientConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._open = asyncio.Event()
        self._refused: ClientError | None = None

    async def __aenter__(self) -> Client:
        """Connect once; raises ClientError when the server cannot be reached or refuses."""
        await self._connect()
        self._reader = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        if self._socket is not None:
            await self._socket.close()

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Answer:
        """Start an answer. `options` are fields of the `chat` message: temperature, max_tokens, seed, speculation, ..."""
        request = {"type": "chat", "messages": list(messages), "resumable": True, **options}
        answer = Answer(self, next(self._ids), request)
        self._answers[answer.id] = answer
        await self.send({**request, "id": answer.id})
        return answer

    async def send(self, message: Message) -> None:
        """Send one message. While the connection is being made anew this waits, up to what `_run` allows."""
        while True:
            await self._open.wait()
            if self._refused is not None:
                raise self._refused
            assert self._socket is not None
            try:
                await self._socket.send(json.dumps(message))
                return
            except ConnectionClosed:
                self._open.clear()

    async def _connect(self) -> None:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else None
        try:
            self._socket = await connect(
                self.url,
                additional_headers=headers,
                subprotocols=[Subprotocol("forespeak.v1.json")],
                max_size=2**24,
            )
            self.hello = json.loads(await self._socket.recv())
        except (OSError, InvalidHandshake, TimeoutError) as error:
            raise ClientError("unreachable", f"cannot connect to {self.url}: {error}; is `forespeak serve` running?") from error
        except ConnectionClosed as error:
            reason = error.rcvd.reason if error.rcvd else "the connection was closed"
            raise ClientError("refused", f"{self.url} refused the connection: {reason}") from error
        self._open.set()

    async def _run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            code = await self._read()
            self._open.clear()
            if code in FINAL_CLOSES:
                self._give_up(ClientError("refused", f"the server closed the connection with code {code}"))
                return
            while True:
                await asyncio.sleep(pause * (0.5 + random.random()))
                pause = min(2 * pause, LONGEST_PAUSE)
                try:
                    await self._connect()
                    break
                except ClientError as error:
                    if error.code == "refused":
                        self._give_up(error)
                        return
            pause = FIRST_PAUSE
            await self._go_on()

    async def _read(self) -> int:
        """Hand messages to their answers until the connection ends; returns its close code."""
        assert self._socket is not None
        try:
            while True:
                self._take(json.loads(await self._socket.recv()))
        except ConnectionClosed as error:
            return error.rcvd.code if error.rcvd else 1006

    def _take(self, message: Message) -> None:
        if message["type"] == "notice":
            self.notices.append(message)
        answer = self._answers.get(message.get("id", ""))
        if answer is not None and answer.take(message):
            del self._answers[answer.id]

    async def _go_on(self) -> None:
        """Resume what had started, ask again for what had not."""
        for answer in list(self._answers.values()):
            if answer.response_id is None:
                await self.send({**answer.request, "id": answer.id})
            else:
                message = {"type": "resume", "id": answer.id, "response_id": answer.response_id, "after_seq": answer.seq}
                await self.send(message)

    def _give_up(self, error: ClientError) -> None:
        self._refused = error
        self._open.set()
        for answer in self._answers.values():
            answer.fail(error)
        self._answers.clear()
