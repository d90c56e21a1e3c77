"""What another user of the machine tries at a listening socket: `python strangers.py`, with JSON on standard input.

Runs on any Python, without this repository: the other user may not be able to read it.
"""

import json
import os
import resource
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

LONG = b"x" * 70_000
FIRST_WORDS = {
    "nothing": b"",
    "zeros": b"\0" * 64,
    "noise": bytes(range(256)) * 256,
    "a head without end": b"GET / HTTP/1.1\r\nA: " + LONG,
    "a body in chunks of one byte": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"1\r\nx\r\n" * 10_000,
    "another host": b"GET /plan HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "a preface of HTTP/2 and gRPC": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 4096,
    "a greeting of ZeroMQ": b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48,
    "a handshake of TLS": b"\x16\x03\x01\x02\x00\x01\x00" + b"\0" * 512,
    "a pickle": b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x02os\x8c\x06system\x93.",
    "many requests at once": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000,
}
NUM_SILENT, HELD_S = 1500, 2.0


def connected(address):
    family = socket.AF_INET if isinstance(address, list) else socket.AF_UNIX
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.settimeout(2)
    opened.connect(tuple(address) if isinstance(address, list) else address.replace("@", "\0", 1))
    return opened


def crowd(address):
    """Hold many silent connections, and say how many were accepted."""
    held = []
    end_s = time.monotonic() + 20
    while len(held) < NUM_SILENT and time.monotonic() < end_s:
        try:
            held.append(connected(address))
        except OSError:
            break
    time.sleep(HELD_S)
    for each in held:
        each.close()
    return len(held)


def say(address, words):
    """Send words, and return the beginning of the answer."""
    try:
        with connected(address) as opened:
            try:
                opened.sendall(words)
                opened.shutdown(socket.SHUT_WR)
                return opened.recv(100).decode("latin-1")
            except OSError as error:
                return type(error).__name__
    except OSError as error:
        return "refused: " + type(error).__name__


def main():
    given = json.loads(sys.stdin.read())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    os.setgroups([])
    os.setgid(given["user"])
    os.setuid(given["user"])
    pairs = [(json.dumps(address), address) for address in given["addresses"]]
    with ThreadPoolExecutor(32) as pool:
        saying = {
            key: {name: pool.submit(say, address, words) for name, words in FIRST_WORDS.items()}
            for key, address in pairs
        }
    said = {key: {name: answer.result() for name, answer in answers.items()} for key, answers in saying.items()}
    print(json.dumps({key: {"said": said[key], "held": crowd(address)} for key, address in pairs}))


if __name__ == "__main__":
    main()
