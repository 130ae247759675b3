from tarshards.kernels._tar_py import Grouper as Grouper
from tarshards.kernels._tar_py import PlainColumn
from tarshards.kernels._tar_py import cut as cut
from tarshards.kernels._tar_py import may_contain as may_contain
from tarshards.kernels._tar_py import scan as scan
from tarshards.kernels._tar_py import walk as walk

def plain_header(name: str, size: int) -> bytes | None: ...
def plain_members(key: str, fields: tuple[str, ...], values: list[bytes], limit: int) -> bytes | None: ...
def plain_rows(
    keys: list[str], columns: list[PlainColumn], row: int, stop: int, limit: int, most: int, offset: int, sample: int
) -> tuple[int, bytes, tuple[bytes, bytes, bytes, bytes]]: ...
