"""Encryption of feeding with CURVE, and the addresses that require it."""

from __future__ import annotations

import ipaddress
import os
import re
from typing import Any

from tarshards.errors import OpenError, UrlError
from tarshards.samples.codecs.registry import require

SERVER, CLIENT = "server", "client"


def make_keys(folder: str) -> list[str]:
    """Write a pair of keys for feeders and a pair for consumers to *folder*; return the names of the files.

    Feeders need ``server.key_secret`` and ``client.key``, consumers ``client.key_secret`` and ``server.key``. The
    secret files are readable by their owner only. Raises OpenError if one of them exists, or cannot be written.
    """
    zmq = _zmq()
    names = [os.path.join(folder, f"{name}.key{end}") for name in (SERVER, CLIENT) for end in ("", "_secret")]
    for path in names:
        if os.path.exists(path):
            raise OpenError("the file exists; keys are not overwritten", url=path)
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        before = os.umask(0o077)
        try:
            for name in (SERVER, CLIENT):
                zmq.auth.create_certificates(folder, name)
        finally:
            os.umask(before)
    except OSError as error:
        raise OpenError(error.strerror or str(error), url=folder, errno=error.errno) from error
    return names


def serve_with(socket: Any, folder: str) -> Any:
    """Let *socket* accept only consumers whose public keys are in *folder*; return its authenticator."""
    from zmq.auth.thread import ThreadAuthenticator

    public, secret = _load(folder, SERVER, "key_secret")
    _load(folder, CLIENT, "key")
    authenticator = ThreadAuthenticator(socket.context)
    authenticator.start()
    authenticator.configure_curve(domain="tarfeed", location=folder)
    socket.curve_publickey, socket.curve_secretkey, socket.curve_server = public, secret, True
    socket.zap_domain = b"tarfeed"
    return authenticator


def client_keys(folder: str) -> tuple[bytes, bytes, bytes]:
    """Return the feeders' public key and a consumer's public and secret key; raise OpenError if one is missing."""
    return (_load(folder, SERVER, "key")[0], *_load(folder, CLIENT, "key_secret"))


def check_address(address: str, keys: str | None, encrypted: bool) -> None:
    """Raise UrlError for an invalid address, or for a network address if *encrypted* is set without *keys*."""
    found = re.fullmatch(r"tcp://(\[[\w:.%]+\]|[^\s:/\[\]]+):(\d+|\*)", address)
    if found is None or (found[2] != "*" and int(found[2]) >= 1 << 16):
        raise UrlError("an address of a feeder is tcp://host:port", url=address)
    if keys is None and encrypted and not _is_loopback(found[1].strip("[]")):
        raise UrlError(
            "feeding over a network is encrypted: make keys with `tarfeed keys FOLDER` and name the folder, or say "
            "that the network is trusted (tarfeed --no-encryption, encrypted=False)",
            url=address,
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _load(folder: str, name: str, end: str) -> tuple[bytes, bytes]:
    path = os.path.join(folder, f"{name}.{end}")
    try:
        public, secret = _zmq().auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise OpenError("no such key; make keys with `tarfeed keys FOLDER`", url=path) from error
    if end == "key_secret" and secret is None:
        raise OpenError("the file has no secret key", url=path)
    return public, secret


def _zmq() -> Any:
    require("zmq.auth", extra="feed")
    return require("zmq", extra="feed")
