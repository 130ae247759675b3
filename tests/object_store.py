"""moto's S3 on 127.0.0.1; a test may inspect, delay, answer or reset each request first."""

from __future__ import annotations

import logging
import os
import struct
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

import pytest

#: What a look at a request may return: a status and a body to answer with, or RESET; None is moto's own answer.
RESET = ("reset", b"")


@dataclass(repr=False)
class ObjectStore:
    """The server: its URL, its requests as (method, path, query), and the function that inspects them first."""

    url: str = ""
    look: Callable[[str, str, str], tuple[str, bytes] | None] | None = None
    requests: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def options(self) -> dict[str, str]:
        """The storage_options that s3fs needs for it."""
        return {"key": "me", "secret": "s3cret", "endpoint_url": self.url}

    def asked(self, method: str, word: str = "") -> int:
        """Return how many requests of *method* had *word* in their query."""
        return sum(1 for each, _, query in self.requests if each == method and word in query)

    @cached_property
    def client(self) -> Any:
        """boto3's client, which is none of ours."""
        import boto3

        login = {"aws_access_key_id": "me", "aws_secret_access_key": "s3cret"}
        return boto3.client("s3", endpoint_url=self.url, region_name="us-east-1", **login)

    def reset(self) -> None:
        """Forget all objects and requests, and recreate `s3://bucket`."""
        self.look = None
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/moto-api/reset", method="POST")).close()
        self.client.create_bucket(Bucket="bucket")
        self.requests.clear()

    def put(self, name: str, data: bytes) -> None:
        """Store an object without a request."""
        from moto.s3.models import s3_backends

        s3_backends["123456789012"]["aws"].put_object("bucket", name, data)

    def objects(self) -> dict[str, bytes]:
        """Return the objects in the bucket."""
        look, self.look = self.look, None
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket="bucket")
        names = [each["Key"] for page in pages for each in page.get("Contents", ())]
        found = {name: self.client.get_object(Bucket="bucket", Key=name)["Body"].read() for name in names}
        self.look = look
        return found

    def uploads(self) -> list[str]:
        """Return the names of the uploads that were begun and neither completed nor aborted."""
        look, self.look = self.look, None
        found = self.client.list_multipart_uploads(Bucket="bucket").get("Uploads", ())
        self.look = look
        return [each["Key"] for each in found]

    def wrapped(self, app: Any) -> Any:
        def serve(environ: dict[str, Any], start: Any) -> Any:
            asked = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"]
            self.requests.append(asked)
            answer = self.look and self.look(*asked)
            if not answer:
                return app(environ, start)
            status, body = answer
            if answer is RESET:
                connection = environ["werkzeug.socket"]
                connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
                os.close(connection.detach())  # closing it would wait for the files of it
                raise ConnectionResetError
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]

        return serve


@contextmanager
def serving(store: ObjectStore | None = None) -> Iterator[ObjectStore]:
    """Serve an empty S3, by *store* if it is given; skip the test where moto is not installed."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    store = store or ObjectStore()
    app = store.wrapped(moto.DomainDispatcherApplication(moto.create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=moto.MotoRequestHandler)
    store.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
