"""A server in this process that answers each request with the bytes, pauses and ends that a test sets."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Writer = asyncio.StreamWriter


@asynccontextmanager
async def serving(
    answer: Callable[[Writer], Awaitable[None]],
    tls: ssl.SSLContext | None = None,
    received: bytearray | None = None,
) -> AsyncIterator[str]:
    """The address of a server that lets ``answer`` write after each request, which is added to ``received``."""
    tasks: set[asyncio.Task[None] | None] = set()

    async def accept(reader: asyncio.StreamReader, writer: Writer) -> None:
        tasks.add(asyncio.current_task())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
            body = await reader.readexactly(length)
            if received is not None:
                received.extend(head + body)
            await answer(writer)
        except (ConnectionError, asyncio.CancelledError, asyncio.IncompleteReadError):
            pass  # the client has parted, or never sent anything on a connection that it opened ahead
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    async with server:
        scheme = "https" if tls else "http"
        yield f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.sleep(0.01)  # until their connections are closed


def writing(*parts: bytes | float) -> Callable[[Writer], Awaitable[None]]:
    """An answer of these bytes, with a pause of so many seconds where a number is among them."""

    async def answer(writer: Writer) -> None:
        for part in parts:
            if isinstance(part, bytes):
                writer.write(part)
                await writer.drain()
            else:
                await asyncio.sleep(part)

    return answer
