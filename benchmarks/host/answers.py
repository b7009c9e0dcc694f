"""Measure how long a server takes to answer its page, from a separate process.

Run: python benchmarks/host/answers.py http://127.0.0.1:8188 [URL ...] [--seconds 60]. It requests `GET /tpu/stats` and
`GET /` from each address ten times a second, over one connection each. A second, idle server shows the machine's share
of the longest answers. Prints JSON, also if its input is closed early.
"""

import argparse
import contextlib
import http.client
import json
import sys
import threading
import time
import urllib.parse
from collections.abc import Sequence

PATHS = ("/tpu/stats", "/")
INTERVAL_S = 0.1
# A tenth of a second is what people take for at once; of slower answers the moments are kept.
SLOW_S = 0.1


class Asker(threading.Thread):
    """Asks one address for one path until it is stopped, and keeps how long each answer took."""

    def __init__(self, url: str, path: str, ended: threading.Event) -> None:
        super().__init__(daemon=True)
        self.url, self.path, self.taken_s, self.slow, self.failed = url, path, [], [], 0
        self._ended = ended

    def run(self) -> None:
        place = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=60)
        with contextlib.closing(connection):
            while not self._ended.wait(INTERVAL_S):
                begun, moment = time.perf_counter(), time.time()
                try:
                    connection.request("GET", self.path)
                    self.failed += connection.getresponse().read() == b""
                except (OSError, http.client.HTTPException):
                    self.failed += 1
                    connection.close()
                taken_s = time.perf_counter() - begun
                self.taken_s.append(taken_s)
                if taken_s >= SLOW_S:
                    self.slow.append((moment, round(taken_s, 3)))

    def found(self) -> dict[str, object]:
        taken = sorted(self.taken_s) or [0.0]
        at = {name: taken[min(len(taken) - 1, int(len(taken) * share))] for name, share in _SHARES.items()}
        return {
            "url": self.url, "path": self.path, "answers": len(self.taken_s), "failed": self.failed,
            **{name: round(1000 * value, 1) for name, value in at.items()}, "slow": self.slow,
        }  # fmt: skip


_SHARES = {"median_ms": 0.5, "p99_ms": 0.99, "worst_ms": 1.0}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="How long a server's page takes to answer.")
    parser.add_argument("urls", nargs="+", metavar="URL", help="as http://127.0.0.1:8188")
    parser.add_argument("--seconds", type=float, metavar="N", help="(until the input is closed)")
    options = parser.parse_args(arguments)
    ended = threading.Event()
    asking = [Asker(url.rstrip("/"), path, ended) for url in options.urls for path in PATHS]
    for asker in asking:
        asker.start()
    if options.seconds:
        ended.wait(options.seconds)
    else:
        sys.stdin.read()
    ended.set()
    for asker in asking:
        asker.join(60)
    print(json.dumps([asker.found() for asker in asking]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
