from tarshards.index._headers_py import MappedMembers as MappedMembers
from tarshards.index._headers_py import find_undecided as find_undecided
