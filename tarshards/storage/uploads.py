"""Objects of s3 and gs are written in parts that go up at once; an object appears whole, or not at all.

fsspec's files upload one part after the other; its `put_file` needs the whole object on the disk before the first byte
goes up, and gcsfs's, too, uploads one part after the other. With 20 MB/s a connection, 256 MB were written at 15 MB/s
by files, at 27 to 72 by `put_file`, and at 66 to 102 by the code here. Bodies go to s3 through our own connections, to
signed URLs, since aiohttp waits for ever for a server that takes no more of a body.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import md5
from io import BytesIO
from typing import Any
from urllib.parse import quote

from tarshards.errors import OpenError
from tarshards.storage.fsspec_ import Requests
from tarshards.storage.location import Location
from tarshards.storage.signing import S3Address
from tarshards.storage.streams import OutputStream
from tarshards.storage.transfer import Patience, StatusError

#: Bytes of a part: stores take 5 MiB to 5 GiB. After every GROWTH parts, the size doubles, so that the 10,000 parts of
#: an object hold more than the 5 TiB that it may have.
PART, GROWTH = 1 << 23, 1000

#: The most parts that are under way at once, and their bytes together unless one part is larger.
MOST, MEMORY = 8, 1 << 26


def size_of_part(number: int) -> int:
    return PART << (number - 1) // GROWTH


class Upload:
    """What is written of one object; each store has its own kind.

    A part is sent when there is more after it, so that small objects are one request. Of a kill -9, parts remain that
    no listing shows until the store expires them.
    """

    def __init__(self, location: Location, store: Any, path: str):
        self.location, self.store, self.path = location, store, path
        self.bucket, self.key = store.split_path(path)[:2]
        self.requests = Requests(location, self.is_over)
        self._buffer = bytearray()
        self._executor: ThreadPoolExecutor | None = None
        self._running: deque[Future[Any]] = deque()
        self._sent: list[Any] = []
        self._is_discarded = False

    @classmethod
    def is_possible(cls, store: Any) -> bool:
        """Return whether *store* has what we use of the package that is best known for it."""
        raise NotImplementedError

    def begin(self) -> None:
        raise NotImplementedError

    def put(self, number: int, data: bytes) -> Any:
        """Store a part; return what `complete` needs of it."""
        raise NotImplementedError

    def complete(self, parts: list[Any]) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Remove the parts of an upload that is not completed."""
        raise NotImplementedError

    def put_whole(self, data: bytes) -> None:
        """Store a small object."""
        self.requests.attempt(lambda: self.store.pipe_file(self.path, data))

    def is_over(self) -> bool:
        return self._is_discarded

    def write(self, data: Any) -> None:
        self._buffer += data
        while len(self._buffer) > size_of_part(self._number):
            self._send(size_of_part(self._number))

    @property
    def _number(self) -> int:
        """The number of the next part."""
        return len(self._sent) + len(self._running) + 1

    def _send(self, size: int) -> None:
        """Let the first bytes of the buffer go up; wait while as many parts are under way as may be."""
        most = min(MOST, self.location.remote.connections)
        if self._executor is None:
            self.begin()
            self._executor = ThreadPoolExecutor(most, "tarshards-upload")
        while len(self._running) >= max(1, min(most, MEMORY // size)):
            self._settle()
        number, data = self._number, bytes(self._buffer[:size])
        del self._buffer[:size]
        self._running.append(self._executor.submit(self.put, number, data))

    def _settle(self) -> None:
        """Wait for the first part under way. One that failed stays there, so that nothing can complete the upload."""
        self._sent.append(self._running[0].result())
        self._running.popleft()

    def finish(self) -> None:
        if self._executor is not None:
            self._send(len(self._buffer))
            while self._running:
                self._settle()
            self._executor.shutdown()

    def commit(self) -> None:
        if self._executor is None:
            self.put_whole(bytes(self._buffer))
        else:
            self.complete(self._sent)
        self.store.invalidate_cache(self.path)

    def discard(self) -> None:
        if self._executor is not None:
            self._is_discarded = True
            self._executor.shutdown(cancel_futures=True)  # a part that comes after the end would stay
            with suppress(Exception):
                self.end()
        self._buffer.clear()


def upload(kind: Upload) -> OutputStream:
    """Return the stream by which an object is written."""
    name = kind.location.name
    return OutputStream(name, kind.write, finish=kind.finish, commit=kind.commit, discard=kind.discard)


class S3Upload(Upload):
    """A multipart upload of S3: bodies go to URLs that s3fs signs, all else through s3fs."""

    id = ""

    @classmethod
    def is_possible(cls, store: Any) -> bool:
        # Options such as a storage class are headers, which no signed URL holds; put_file of s3fs sends them.
        return hasattr(store, "call_s3") and not (store.s3_additional_kwargs or store.req_kw)

    def begin(self) -> None:
        self.id = self._call("create_multipart_upload")["UploadId"]

    def put(self, number: int, data: bytes) -> dict[str, Any]:
        tag = self._put(data, client_method="upload_part", UploadId=self.id, PartNumber=number)
        return {"PartNumber": number, "ETag": tag}

    def put_whole(self, data: bytes) -> None:
        self._put(data, client_method="put_object")

    def complete(self, parts: list[Any]) -> None:
        self._call("complete_multipart_upload", UploadId=self.id, MultipartUpload={"Parts": parts})

    def end(self) -> None:
        self.store.call_s3("abort_multipart_upload", Bucket=self.bucket, Key=self.key, UploadId=self.id)

    def _call(self, method: str, **options: Any) -> Any:
        return self.requests.attempt(lambda: self.store.call_s3(method, Bucket=self.bucket, Key=self.key, **options))

    def _put(self, data: bytes, **operation: Any) -> str | None:
        """Send a body; return its ETag."""
        checksum = checksum_of(data)
        address = S3Address(self.location, ContentMD5=checksum, **operation)
        headers = {"Content-MD5": checksum, "Content-Length": str(len(data))}

        def action() -> str | None:
            try:
                with address.request(headers, method="PUT", body=BytesIO(data)) as response:
                    return response.headers.get("ETag")
            except StatusError as error:
                if error.code == 400:  # what S3 answers to a body that came incomplete or altered, or too slowly
                    raise ConnectionError(str(error)) from error
                raise

        return Patience(address, self.is_over).attempt(action)


class GsUpload(Upload):
    """A multipart upload of Google Cloud Storage (its XML API), through gcsfs, which repeats requests itself."""

    id = ""

    @classmethod
    def is_possible(cls, store: Any) -> bool:
        return hasattr(store, "call") and hasattr(store, "base")

    def begin(self) -> None:
        _, answer = self._call("POST", uploads="")
        found = re.search(rb"<UploadId>([^<]+)</UploadId>", answer)
        if not found:
            raise OpenError("the store began no upload", url=self.location.name)
        self.id = found[1].decode()

    def put(self, number: int, data: bytes) -> str:
        headers = {"Content-MD5": checksum_of(data)}
        answer, _ = self._call("PUT", headers=headers, data=data, partNumber=number, uploadId=self.id)
        return f"<Part><PartNumber>{number}</PartNumber><ETag>{answer['ETag']}</ETag></Part>"

    def complete(self, parts: list[Any]) -> None:
        text = f"<CompleteMultipartUpload>{''.join(parts)}</CompleteMultipartUpload>"
        _, answer = self._call("POST", data=text.encode(), uploadId=self.id)
        if b"<CompleteMultipartUploadResult" not in answer:  # an error may come after the status
            raise OpenError("the store did not complete the upload", url=self.location.name)

    def end(self) -> None:
        self.store.call("DELETE", self._url, uploadId=self.id)

    @property
    def _url(self) -> str:
        return f"{self.store.base.removesuffix('/storage/v1/')}/{self.bucket}/{quote(self.key)}"

    def _call(self, method: str, **options: Any) -> Any:
        return self.requests.attempt(lambda: self.store.call(method, self._url, **options))


def checksum_of(data: bytes) -> str:
    """Return what the Content-MD5 of a request says."""
    return b64encode(md5(data, usedforsecurity=False).digest()).decode()
