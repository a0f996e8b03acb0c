"""Runs a program where there is no network but loopback: `unshare --net python cut_off.py PROGRAM...`.

Brings the new namespace's loopback up itself, since a plain machine has no `ip`.
"""

import fcntl
import os
import socket
import struct
import sys

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1

if __name__ == "__main__":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
        name, flags = struct.unpack_from("16sh", request)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", name, flags | IFF_UP))
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606
