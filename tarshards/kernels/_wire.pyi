from tarshards.kernels._wire_py import STREAM as STREAM
from tarshards.kernels._wire_py import receive as receive
