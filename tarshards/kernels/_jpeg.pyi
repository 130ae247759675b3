from typing import Any

def open_library(name: str) -> str | None: ...
def headers(found: Any, addresses: Any, sizes: Any, finds_exif: bool) -> None: ...
def decode(
    decoded: Any,
    rows: Any,
    addresses: Any,
    sizes: Any,
    boxes: Any,
    flips: Any,
    targets: Any,
    planar: bool,
    normal: Any,
) -> None: ...
def header(data: bytes) -> tuple[int, int, str]: ...
def whole(out: Any, data: bytes, mode: str, eighths: int) -> None: ...
