"""URLs without the credentials that they may hold: for messages, logs and names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_USERINFO = r"(?<=://)[^/?#]*@"
_USERINFO_IN_TEXT = r"(?<=://)[^\s/?#]*@"
# What follows `://` is taken whether or not it has a query, so that no text is searched twice.
_QUERY_IN_TEXT = r"""(://[^\s'"?]*\?|\?(?=[\w.%-]+=))([^\s'"|;<>()`]*)|://[^\s'"?]*"""
# A token has a character that words lack: there is none in "basic authentication".
_TOKEN_IN_TEXT = r"(?i)\b(bearer|basic) +(?=\S*[\d=+/_.-])[^\s'\"]{8,}"
_SECRET_OPTION = r"(?i)key|secret|token|pass|sas|credential|connection_string"
#: Parameters of a query that sign it, in lower case: of AWS, Google, Alibaba, Tencent, Azure, Akamai, and bare tokens.
_SIGNATURE = (
    r"x-(amz|goog|oss)-.+|signature|expires|key-pair-id|(aws|oss)accesskeyid|googleaccessid|security-token|sig|"
    r"q-(sign-algorithm|ak|sign-time|key-time|header-list|url-param-list|signature)|"
    r"hdn(ts|ea|tl)|__token__|__gda__|(access_|auth_)?token"
)
#: Parameters that only sign a query beside one named signature or sig: CloudFront's policy, and what Azure signs.
_BESIDE_SIGNATURE = r"policy|s[vrpte]|ss|srt|si|sip|spr|sdd|ses|scid|s[aku]oid|sktid|sk[tesv]"
_SHORTEST = 6  # characters of a secret that is hidden in any text; a shorter one could be part of a word


def without_userinfo(url: str) -> str:
    """Return *url* without a user's name and password.

    >>> without_userinfo("http://me:secret@host/a.tar")
    'http://host/a.tar'
    """
    return re.sub(_USERINFO, "", url)


def without_values(query: str) -> str:
    """Return *query* with dots in place of its values, and of keys that may be values.

    >>> without_values("X-Amz-Expires=60&X-Amz-Signature=abc&token")
    'X-Amz-Expires=...&X-Amz-Signature=...&...'
    """
    parts = []
    for part in query.split("&"):
        key, _, value = part.partition("=")
        # A word without a value may be a token, even if it ends in the padding of base64.
        parts.append(f"{key}=..." if value.strip("=") and re.fullmatch(r"[\w.%-]+", key) else "..." if part else "")
    return "&".join(parts)


def without_signature(query: str) -> str:
    """Return *query* without the parameters that sign it, which differ in each request for an object.

    >>> without_signature("f=a&X-Amz-Expires=60&X-Amz-Signature=abc"), without_signature("se=1&sig=abc")
    ('f=a', '')
    >>> without_signature("f=a&se=1&key=k")
    'f=a&se=1&key=k'
    """
    names = [part.partition("=")[0].lower() for part in query.split("&")]
    signing = f"{_SIGNATURE}|{_BESIDE_SIGNATURE}" if {"signature", "sig"}.intersection(names) else _SIGNATURE
    return "&".join(part for part, name in zip(query.split("&"), names) if not re.fullmatch(signing, name))


def without_credentials(url: str) -> str:
    """Return *url* as files name it: without a user, parameters that sign it or look like secrets, and bare words.

    Before the @ of a store's URL may be a container or a user, which stay unless a password follows.

    >>> without_credentials("http://me:secret@host/get.tar?f=a&api_key=1&X-Amz-Signature=abc&t0ken")
    'http://host/get.tar?f=a'
    >>> without_credentials("abfs://container@host/a.tar"), without_credentials("sftp://me:secret@host/a.tar")
    ('abfs://container@host/a.tar', 'sftp://host/a.tar')
    """
    userinfo = _USERINFO if url.lower().startswith(("http:", "https:")) else r"(?<=://)[^/?#@]*:[^/?#]*@"
    path, _, rest = re.sub(userinfo, "", url).partition("?")
    query, mark, fragment = rest.partition("#")
    kept = [part for part in without_signature(query).split("&") if re.fullmatch("[^=]+=.+", part)]
    kept = [part for part in kept if not re.search(_SECRET_OPTION, part.partition("=")[0])]
    return f"{path}{'?' * bool(kept)}{'&'.join(kept)}{mark}{fragment}"


def secrets_of(url: str) -> set[str]:
    """Return the credentials in *url*, both quoted and unquoted: its user, password, and query values.

    >>> sorted(secrets_of("http://me:pass%20word@host/a.tar?signature=abc%2Fdef&x=1"))
    ['abc%2Fdef', 'abc/def', 'bWU6cGFzcyB3b3Jk', 'me:pass word', 'me:pass%20word', 'pass word', 'pass%20word']
    """
    import base64
    from urllib.parse import unquote

    found = set()
    for userinfo in re.findall(_USERINFO, url):
        login = userinfo[:-1]
        found |= {login, login.partition(":")[2]}
        found.add(base64.b64encode(unquote(login).encode()).decode())
    for query in url.split("?")[1:]:
        found |= {part.partition("=")[2] or part for part in re.split("[&#]|::", query)}
    return {form for secret in found for form in (secret, unquote(secret)) if len(form) >= _SHORTEST}


def secrets_in(options: Mapping[str, Any]) -> set[str]:
    """Return the credentials in the options of a store, at any depth.

    >>> sorted(secrets_in({"key": "public-key", "endpoint_url": "http://host", "token": {"private_key": "pr1vate"}}))
    ['pr1vate', 'public-key']
    """
    found = set()
    for name, value in options.items():
        if isinstance(value, Mapping):
            found |= secrets_in(value)
        elif isinstance(value, str) and len(value) >= _SHORTEST and re.search(_SECRET_OPTION, str(name)):
            found.add(value)
    return found


def _without_query(found: re.Match[str]) -> str:
    return found[0] if found[1] is None else found[1] + without_values(found[2])


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Return *text*, a message or a command, with URLs, tokens and all occurrences of *secrets* redacted.

    >>> redacted("403 for url 'https://me:secret@host/a.tar?signature=abc'")
    "403 for url 'https://host/a.tar?signature=...'"
    >>> redacted("bad request line 'GET /a.tar?signature=abc', Authorization: Bearer abc.123456")
    "bad request line 'GET /a.tar?signature=...', Authorization: Bearer ..."
    """
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "...")
    text = re.sub(_USERINFO_IN_TEXT, "", text) if "://" in text else text
    text = re.sub(_QUERY_IN_TEXT, _without_query, text) if "?" in text else text
    return re.sub(_TOKEN_IN_TEXT, r"\1 ...", text)
