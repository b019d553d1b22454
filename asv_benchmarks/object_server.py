"""A store of objects in memory that speaks as much of S3's protocol as a tier does.

It takes the least time that a server in Python can, while moto's takes most of a benchmark's time::

    python asv_benchmarks/object_server.py PORT
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading

FOUND = b'HTTP/1.1 %d X\r\nETag: "a"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n'
LENGTH = b"Content-Length: %d\r\n\r\n"


def serve(client: socket.socket, kept: dict[bytes, bytearray]) -> None:
    """Answer the requests of a connection."""
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError), client, client.makefile("rb") as lines:
        while line := lines.readline():
            method, path, _ = line.split(b" ")
            heads = {}
            while (head := lines.readline()) not in {b"\r\n", b""}:
                name, _, value = head.partition(b":")
                heads[name.lower()] = value.strip()
            data = bytearray(int(heads.get(b"content-length", 0)))
            left = memoryview(data)
            while left:
                left = left[lines.readinto(left) or len(left) :]
            status, body, size = 200, b"", 0
            if method == b"PUT":
                if b"if-none-match" in heads and path in kept:
                    status = 412
                else:
                    kept[path] = data
            elif path not in kept:
                status = 404
            elif method == b"DELETE":
                del kept[path]
            else:
                size = len(kept[path])
                body = kept[path] if method == b"GET" else b""
            client.sendall(FOUND % status + LENGTH % size)
            client.sendall(body)


def main() -> None:
    kept: dict[bytes, bytearray] = {}
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=512)
    while True:
        client, _ = listener.accept()
        threading.Thread(target=serve, args=(client, kept), daemon=True).start()


if __name__ == "__main__":
    main()
