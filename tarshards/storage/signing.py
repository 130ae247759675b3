"""Objects of stores over our own connections: by URLs that a store signs, or with the token that it has.

The packages of the stores find the credentials; what their files of fsspec do is not used.
"""

from __future__ import annotations

from functools import cache
from threading import Lock
from time import monotonic
from typing import Any
from urllib.parse import quote

from tarshards.storage.connections import Origin
from tarshards.storage.fsspec_ import Requests, find_store
from tarshards.storage.location import Location
from tarshards.storage.locks import PerProcess
from tarshards.storage.transfer import Address

EXPIRY = 3600  # seconds for which a signed URL is valid

#: Seconds for which a token is taken to be valid; gcsfs gets another 300 seconds before one expires.
TOKEN_EXPIRY = 240


class StoreAddress(Address):
    """Where an object is asked for: a URL and headers that its store gives, and gives again before they expire."""

    def __init__(self, location: Location):
        self.location, self.name = location, location.name
        self._lock = PerProcess(Lock)
        self._given: tuple[str, dict[str, str]] = "", {}
        self._until = 0.0

    @property
    def target(self) -> tuple[str, dict[str, str]]:
        with self._lock():
            if monotonic() >= self._until:
                self._ask()
            return self._given

    def renew(self) -> bool:
        with self._lock():
            self._ask()
        return True

    def _ask(self) -> None:
        store, path = find_store(self.location)  # which a forked process makes anew

        def sign() -> tuple[str, dict[str, str], float] | None:
            try:
                return self.sign(store, path)
            except (NotImplementedError, AttributeError):  # a store of another package under this scheme
                return None

        given = Requests(self.location).attempt(sign)
        if given is None:
            raise NotImplementedError
        url, headers, seconds = given
        self._given, self._until = (url, headers), monotonic() + seconds

    def sign(self, store: Any, path: str) -> tuple[str, dict[str, str], float]:
        """Return a URL of the object at *path*, headers for it, and for how many seconds to use them.

        Raises NotImplementedError where *store* has none that a web client can use.
        """
        raise NotImplementedError


class S3Address(StoreAddress):
    """An object of S3; *operation* says what else than reading its URL allows, in the words of botocore."""

    def __init__(self, location: Location, **operation: Any):
        super().__init__(location)
        self._operation = operation

    def sign(self, store: Any, path: str) -> tuple[str, dict[str, str], float]:
        return store.sign(path, expiration=EXPIRY, **self._operation), {}, EXPIRY / 2


class GsAddress(StoreAddress):
    """An object of Google Cloud Storage, by its XML API: an ETag there is of the content alone."""

    def sign(self, store: Any, path: str) -> tuple[str, dict[str, str], float]:
        bucket, key, generation = store.split_path(path)
        if generation or getattr(store, "_use_client_cert", False) or _is_zonal(store, bucket):
            raise NotImplementedError
        headers: dict[str, str] = {}
        store.credentials.apply(headers)
        if payer := store.project if store.requester_pays is True else store.requester_pays:
            headers["x-goog-user-project"] = payer
        return f"{store.base.removesuffix('/storage/v1/')}/{bucket}/{quote(key)}", headers, TOKEN_EXPIRY


@cache
def _is_zonal(store: Any, bucket: str) -> bool:
    """Return whether a bucket is read by gRPC only; asked once, of Google's servers only: others know no such buckets.

    gcsfs waits for a minute where the question has no answer.
    """
    if not hasattr(store, "_sync_lookup_bucket_type") or "googleapis.com" not in store.base:
        return False
    return bool(store._sync_lookup_bucket_type(bucket).name.startswith("ZONAL"))


class HfAddress(StoreAddress):
    """A file of a repository on the Hugging Face Hub, which redirects to the servers that have it."""

    def sign(self, store: Any, path: str) -> tuple[str, dict[str, str], float]:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        found = store.resolve_path(path)
        if not hasattr(found, "repo_id"):
            raise NotImplementedError
        url = hf_hub_url(
            found.repo_id,
            found.path_in_repo,
            repo_type=found.repo_type,
            revision=found.revision,
            endpoint=store.endpoint,
        )
        token = {name: value for name, value in build_hf_headers(token=store.token).items() if name == "authorization"}
        return url, token, EXPIRY


ADDRESSES: dict[str, type[StoreAddress]] = {
    "s3": S3Address,
    "s3a": S3Address,
    "gs": GsAddress,
    "gcs": GsAddress,
    "hf": HfAddress,
}


def address_of(location: Location) -> StoreAddress | None:
    """Return the address of an object; None if its store gives none that a web client can read."""
    if len(location.links) > 1 or location.scheme not in ADDRESSES:
        return None
    address = ADDRESSES[location.scheme](location)
    try:
        is_known = Origin.of(address.target[0]) is not None
    except (NotImplementedError, ValueError):
        return None
    return address if is_known else None
