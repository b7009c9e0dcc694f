"""Measure how long a server takes to answer while other Python threads compute, by the interpreter's switch interval.

Run: python benchmarks/host/switch_interval.py [--threads 4] [--seconds 12]. Another process requests a page of 2 kB
twenty times a second. Prints a line of JSON for each interval, with the work that the busy threads did meanwhile.
"""

import argparse
import asyncio
import json
import sys
import threading

from aiohttp import web

INTERVALS_S = (0.005, 0.001, 0.0005)
BODY = b"x" * 2000
ASK = """
import http.client, json, sys, time
connection, taken = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1])), []
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    begun = time.perf_counter()
    connection.request("GET", "/")
    connection.getresponse().read()
    taken.append(1000 * (time.perf_counter() - begun))
    time.sleep(0.05)
taken.sort()
print(json.dumps({"answers": len(taken), "median_ms": round(taken[len(taken) // 2], 1),
                  "p99_ms": round(taken[int(len(taken) * 0.99)], 1), "worst_ms": round(taken[-1], 1)}))
"""


class BusyThreads:
    """Threads that compute in Python until they are stopped, and count their work."""

    def __init__(self, count: int) -> None:
        self._is_stopped, self._counts = threading.Event(), [0] * count
        self._threads = [threading.Thread(target=self._work, args=(index,)) for index in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> int:
        """Stop the threads, and return their work in thousands of additions."""
        self._is_stopped.set()
        for thread in self._threads:
            thread.join()
        return sum(self._counts)

    def _work(self, index: int) -> None:
        sums = dict.fromkeys(range(100), 0)
        while not self._is_stopped.is_set():
            for number in range(1000):
                sums[number % 100] += 1
            self._counts[index] += 1


async def measure(threads: int, seconds: float) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=BODY)

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    port = str(runner.addresses[0][1])
    for interval_s in INTERVALS_S:
        sys.setswitchinterval(interval_s)
        busy = BusyThreads(threads)
        asking = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ASK, port, str(seconds), stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await asking.communicate()
        print(json.dumps({"interval_ms": 1000 * interval_s, **json.loads(printed), "work": busy.stop()}), flush=True)
    await site.stop()
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=4, help="busy threads (4)")
    parser.add_argument("--seconds", type=float, default=12, help="for each interval (12)")
    options = parser.parse_args()
    asyncio.run(measure(options.threads, options.seconds))


if __name__ == "__main__":
    main()
