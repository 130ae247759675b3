from tarshards.kernels._sidecars_py import are_listed as are_listed
from tarshards.kernels._sidecars_py import read_heads as read_heads
