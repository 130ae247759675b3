from tarshards.tar._tar_py import cut as cut
from tarshards.tar._tar_py import scan as scan
from tarshards.tar._tar_py import walk as walk

def plain_header(name: str, size: int) -> bytes | None: ...
