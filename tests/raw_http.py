"""Requests that no client library would send."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit


async def sent(url: str, path: str, body: bytes, *headers: str) -> tuple[int, Any]:
    """Status and JSON answer of a request that is sent as it is, whatever its headers say of it."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    lines = (f"POST {path} HTTP/1.1", f"Host: {address.netloc}", *headers)
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    answer = json.loads(await reader.readexactly(int(head.partition("content-length: ")[2].split()[0])))
    writer.close()
    return int(head.split()[1]), answer
