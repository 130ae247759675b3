"""A server of one dataset that takes the requests by which huggingface_hub publishes and reads it.

It answers what the clients ask for in the tests, and is no evidence of what the Hub itself takes. It has neither limits
nor checks, and Git LFS alone; the Hub prefers Xet, its storage by chunks.
"""

from __future__ import annotations

import json
from base64 import b64decode
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from urllib.parse import unquote, urlsplit

from tarshards.testing.faulty_server import Answer, Server

NAME = "me/digits"
TOKEN = "hf_token"
COMMIT = "0" * 40
LARGE = ".tar", ".index"  # what is stored apart from the commits
NONE = Answer(status="404 Not Found", headers=(("X-Error-Code", "EntryNotFound"),), end="keep"), b""


def as_json(value: object) -> tuple[Answer, bytes]:
    return Answer(headers=(("Content-Type", "application/json"),), ranges=False, end="keep"), json.dumps(value).encode()


@dataclass(repr=False)
class Hub(Server):
    """*files* are those of the last commit, of *commits*; *stored* are contents by their SHA-256."""

    files: dict[str, bytes] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    created: dict[str, object] = field(default_factory=dict)
    commits: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """The settings by which clients find this server."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}

    def choose(self, method, path, headers, body):
        place = unquote(urlsplit(path).path)
        if method == "PUT":
            digest = place.removeprefix("/stored/")
            assert sha256(body).hexdigest() == digest
            self.stored[digest] = body
            return as_json({})
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return Answer(status="401 Unauthorized", end="keep"), b""
        if place.startswith(f"/datasets/{NAME}/resolve/"):
            return self.resolve(place.split("/", 5)[5])
        answer = self.write(place, body) if method == "POST" else self.read(place)
        return NONE if answer is None else as_json(answer)

    def write(self, place: str, body: bytes) -> object:
        """Answer a request to publish; they come in this order."""
        if place == "/api/repos/create":
            self.created = json.loads(body)
            return {"url": f"{self.url}/datasets/{NAME}"}
        if place == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if place == f"/api/datasets/{NAME}/preupload/main":
            files = json.loads(body)["files"]
            return {"files": [self.mode(file["path"]) for file in files]}
        if place == f"/datasets/{NAME}.git/info/lfs/objects/batch":
            return {"objects": [self.place(**each) for each in json.loads(body)["objects"]]}
        if place == f"/api/datasets/{NAME}/commit/main":
            for line in body.splitlines():
                self.change(**json.loads(line))
            self.commits += 1
            return {"commitOid": COMMIT, "commitUrl": f"{self.url}/datasets/{NAME}/commit/{COMMIT}"}
        return None

    def mode(self, path: str) -> dict[str, object]:
        """How a file is to be sent: in the commit, or before."""
        mode = "lfs" if path.endswith(LARGE) else "regular"
        oid = self.oid(path) if path in self.files else None
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def oid(self, path: str) -> str:
        data = self.files[path]
        if path.endswith(LARGE):
            return sha256(data).hexdigest()
        return sha1(b"blob %d\0" % len(data) + data).hexdigest()  # Git's

    def place(self, oid: str, size: int) -> dict[str, object]:
        where = {} if oid in self.stored else {"actions": {"upload": {"href": f"{self.url}/stored/{oid}"}}}
        return {"oid": oid, "size": size} | where

    def change(self, key: str, value: dict[str, str]) -> None:
        if key == "file":
            self.files[value["path"]] = b64decode(value["content"])
        elif key == "lfsFile":
            self.files[value["path"]] = self.stored[value["oid"]]

    def read(self, place: str) -> object:
        """Answer what is asked about the dataset."""
        if place.startswith(f"/api/datasets/{NAME}/tree/"):
            sizes = {path: len(data) for path, data in self.files.items()}
            return [{"type": "file", "path": path, "size": size, "oid": self.oid(path)} for path, size in sizes.items()]
        if place in [f"/api/datasets/{NAME}" + of for of in ("", "/revision/main", f"/revision/{COMMIT}")]:
            return {"id": NAME, "sha": COMMIT, "private": True, "tags": [], "downloads": 0}
        return None

    def resolve(self, place: str) -> tuple[Answer, bytes]:
        path = place.partition("/")[2]
        if path not in self.files:
            return NONE
        headers = (("X-Repo-Commit", COMMIT),)
        return Answer(headers=headers, etag=f'"{self.oid(path)}"', end="keep"), self.files[path]
