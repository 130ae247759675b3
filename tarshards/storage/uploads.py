"""Objects of s3 and gs are written in parts that go up at once; an object appears whole, or not at all.

The parts go through the store's own requests, `call_s3` of s3fs and `call` of gcsfs, which sign them and add checksums.
fsspec's files upload one part after the other. Its `put_file` needs the whole object on the disk before the first byte
goes up, and gcsfs's, too, uploads one part after the other. With 20 MB/s a connection, 256 MB were written at 16 MB/s
by files, at 50 to 85 by `put_file`, and at 100 by the code here.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import md5
from typing import Any, Protocol
from urllib.parse import quote

from tarshards.storage.fsspec_ import Requests, find_store
from tarshards.storage.location import Location
from tarshards.storage.streams import OutputStream

#: Bytes of a part: stores take 5 MiB to 5 GiB. After every GROWTH parts, the size doubles, so that the 10,000 parts of
#: an object hold more than the 5 TiB that it may have.
PART, GROWTH = 1 << 23, 1000

#: The most parts that are under way at once, and their bytes together unless one part is larger.
MOST, MEMORY = 8, 1 << 26


def size_of_part(number: int) -> int:
    return PART << (number - 1) // GROWTH


class Parts(Protocol):
    """How a store takes an object in parts: an upload is begun, given parts in any order, and completed or aborted."""

    def begin(self) -> None: ...

    def put(self, number: int, data: bytes) -> Any:
        """Store a part; return what `complete` needs of it."""

    def complete(self, parts: list[Any]) -> None: ...

    def abort(self) -> None: ...


def upload(location: Location) -> OutputStream:
    """Return a stream into an object of s3 or gs: small ones are one request, others several at once."""
    sending = Upload(location)
    return OutputStream(
        location.name, sending.write, finish=sending.finish, commit=sending.commit, discard=sending.discard
    )


class Upload:
    """What is written of one object. Of a kill -9, parts remain that no listing shows until the store expires them."""

    def __init__(self, location: Location):
        self.location = location
        self.store, self.path = find_store(location)
        self.parts: Parts = (S3Parts if location.scheme in ("s3", "s3a") else GsParts)(self.store, self.path)
        self.buffer = bytearray()
        self.executor: ThreadPoolExecutor | None = None
        self.running: deque[Future[Any]] = deque()
        self.sent: list[Any] = []
        self.is_discarded = False
        self._requests = Requests(location, lambda: self.is_discarded)

    def write(self, data: Any) -> None:
        self.buffer += data
        while len(self.buffer) > size_of_part(self._number):  # the last part goes up when the stream is closed
            self._send(size_of_part(self._number))

    @property
    def _number(self) -> int:
        """The number of the next part."""
        return len(self.sent) + len(self.running) + 1

    def _send(self, size: int) -> None:
        """Let the first bytes of the buffer go up; wait while as many parts are under way as may be."""
        if self.executor is None:
            self._requests.attempt(self.parts.begin)
            self.executor = ThreadPoolExecutor(min(MOST, self.location.remote.connections), "tarshards-upload")
        while len(self.running) >= max(1, min(MOST, self.location.remote.connections, MEMORY // size)):
            self._settle()
        number, data = self._number, bytes(self.buffer[:size])
        del self.buffer[:size]
        self.running.append(self.executor.submit(self._requests.attempt, lambda: self.parts.put(number, data)))

    def _settle(self) -> None:
        """Wait for the first part under way. One that failed stays there, so that nothing can complete the upload."""
        self.sent.append(self.running[0].result())
        self.running.popleft()

    def finish(self) -> None:
        if self.executor is not None:
            self._send(len(self.buffer))
            while self.running:
                self._settle()
            self.executor.shutdown()

    def commit(self) -> None:
        if self.executor is None:
            self._requests.attempt(lambda: self.store.pipe_file(self.path, bytes(self.buffer)))
        else:
            self._requests.attempt(lambda: self.parts.complete(self.sent))
            self.store.invalidate_cache(self.path)

    def discard(self) -> None:
        if self.executor is not None:
            self.is_discarded = True
            self.executor.shutdown(cancel_futures=True)  # a part that comes after the abort would stay
            with suppress(Exception):
                self.parts.abort()
        self.buffer.clear()


class S3Parts:
    """A multipart upload of S3, through s3fs."""

    def __init__(self, store: Any, path: str):
        bucket, key, _ = store.split_path(path)
        self.store, self.names = store, {"Bucket": bucket, "Key": key}

    def begin(self) -> None:
        self.names["UploadId"] = self.store.call_s3("create_multipart_upload", **self.names)["UploadId"]

    def put(self, number: int, data: bytes) -> dict[str, Any]:
        answer = self.store.call_s3("upload_part", **self.names, PartNumber=number, Body=data)
        # The checksum, if the store's options ask for one, is named again at the end.
        return {"PartNumber": number} | {key: answer[key] for key in ("ETag", "ChecksumSHA256") if key in answer}

    def complete(self, parts: list[Any]) -> None:
        self.store.call_s3("complete_multipart_upload", **self.names, MultipartUpload={"Parts": parts})

    def abort(self) -> None:
        self.store.call_s3("abort_multipart_upload", **self.names)


class GsParts:
    """A multipart upload of Google Cloud Storage (its XML API), through gcsfs."""

    def __init__(self, store: Any, path: str):
        bucket, key, _ = store.split_path(path)
        self.store, self.id = store, ""
        self.url = f"{store.base.removesuffix('/storage/v1/')}/{bucket}/{quote(key)}"

    def begin(self) -> None:
        _, answer = self.store.call("POST", self.url, uploads="")
        found = re.search(rb"<UploadId>([^<]+)</UploadId>", answer)
        if not found:
            raise OSError("the store began no upload")
        self.id = found[1].decode()

    def put(self, number: int, data: bytes) -> str:
        headers = {"Content-MD5": b64encode(md5(data, usedforsecurity=False).digest()).decode()}
        answer, _ = self.store.call("PUT", self.url, headers=headers, data=data, partNumber=number, uploadId=self.id)
        return f"<Part><PartNumber>{number}</PartNumber><ETag>{answer['ETag']}</ETag></Part>"

    def complete(self, parts: list[str]) -> None:
        text = f"<CompleteMultipartUpload>{''.join(parts)}</CompleteMultipartUpload>"
        _, answer = self.store.call("POST", self.url, data=text.encode(), uploadId=self.id)
        if b"<CompleteMultipartUploadResult" not in answer:  # an error may come after the status
            raise OSError("the store did not complete the upload")

    def abort(self) -> None:
        self.store.call("DELETE", self.url, uploadId=self.id)
