from typing import Any

def resize(
    out: Any,
    addresses: Any,
    shape: tuple[int, int, int],
    boxes: Any,
    flips: Any,
    size: tuple[int, int],
    planar: bool,
    normal: Any,
) -> None: ...
