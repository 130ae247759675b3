"""URLs without the credentials that they may hold: for messages, logs and names."""

from __future__ import annotations

import re

_USERINFO = r"(?<=://)[^/?#]*@"
_USERINFO_IN_TEXT = r"(?<=://)[^\s/?#]*@"
_QUERY_IN_TEXT = r"""(://[^\s'"?]*\?)([^\s'"|;<>()`]*)"""


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
        # A lone word, also one padded as base64 is, may be a token.
        parts.append(f"{key}=..." if value.strip("=") and re.fullmatch(r"[\w.%-]+", key) else "..." if part else "")
    return "&".join(parts)


def redacted(text: str) -> str:
    """Return *text*, a message or a command, with the URLs in it redacted.

    >>> redacted("403 for url 'https://me:secret@host/a.tar?signature=abc'")
    "403 for url 'https://host/a.tar?signature=...'"
    """
    if "://" not in text:
        return text
    text = re.sub(_USERINFO_IN_TEXT, "", text)
    return re.sub(_QUERY_IN_TEXT, lambda match: match[1] + without_values(match[2]), text)
