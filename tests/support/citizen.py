"""What is asked of a server with the neighbour pack `citizen_pack.py`: every family's miniature, by a websocket client.

For tests of memory and cancelling, and for `benchmarks/soak.py`.
"""

import asyncio
import json
import threading
from io import BytesIO
from pathlib import Path

import aiohttp
from PIL import Image

from ...nodes.graphs.tiny_models import make_tiny
from ...nodes.headless.runner import HEADLESS_NODES
from ...nodes.headless.workflow import to_api
from .comfyui_server import PACK, Server, make_random
from .patience import PATIENCE_S, until

CITIZEN_PACK = (Path(__file__).parent / "citizen_pack.py").read_text()
EXAMPLES_FOLDER = PACK / "examples"
PICTURE = EXAMPLES_FOLDER / "wan_i2v_input.jpg"
EXAMPLES = {
    "Wan21": "wan21_t2v_720p",
    "Wan22I2V": "wan22_i2v_720p",
    "Flux2": "flux2_t2i",
    "ZImage": "z_image_turbo",
    "QwenImage": "qwen_image_2512",
    "CogVideoX": "cogvideox_t2v_768p",
    "HunyuanVideo15": "hunyuan15_t2v_720p",
}
# HunyuanVideo's step needs 3.2 MiB of weights and 69.6 MiB to run; the weights of all families are 15.5 MiB a chip.
BUDGET_MIB = 74


def example(stem: str, *, is_random: bool = True, is_pipeline: bool = False, **inputs: object) -> dict:
    """An example on its miniature, with random weights or as `--tiny` takes it, two or three latent frames, 2 steps."""
    folder = EXAMPLES_FOLDER / ("pipeline" if is_pipeline else "api")
    graph = to_api(json.loads((folder / f"{stem}.json").read_text()), HEADLESS_NODES)
    (make_random if is_random else make_tiny)(graph)
    small = {"num_frames": 9 if stem.startswith("cogvideox") else 5, "num_inference_steps": 2, **inputs}
    for node in graph.values():
        node["inputs"] |= {name: value for name, value in small.items() if name in node["inputs"]}
    return graph


def workflow(family: str, *, saves: bool = False, **inputs: object) -> dict:
    """A family's example, ending in a digest of its frames; one that `saves` them also writes its file."""
    graph = example(EXAMPLES[family], **inputs)
    saved = [name for name, node in graph.items() if node["class_type"] in ("SaveVideo", "SaveImage", "CreateVideo")]
    for name in () if saves else saved:
        del graph[name]
    decoder = next(name for name, node in graph.items() if node["class_type"].endswith("TPUVAEDecoder"))
    graph["digest"] = {"class_type": "CitizenDigest", "inputs": {"image": [decoder, 0]}}
    return graph


def digest(entry: dict) -> str:
    return entry["outputs"]["digest"]["digest"][0]


class Listener(threading.Thread):
    """A websocket client: keeps every message."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.client_id, self.messages, self.images = f"client{id(self)}", [], []
        self._server = server
        self._ready, self._ended = threading.Event(), threading.Event()

    def __enter__(self) -> "Listener":
        self.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(PATIENCE_S)

    def run(self) -> None:
        asyncio.run(self._listen())

    async def _listen(self) -> None:
        url = f"{self._server.url}/ws?clientId={self.client_id}"
        async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=2**26) as socket:
            self._ready.set()
            while not self._ended.is_set():
                try:
                    message = await socket.receive(timeout=0.2)
                except TimeoutError:
                    continue
                if message.type == aiohttp.WSMsgType.TEXT:
                    self.messages.append(json.loads(message.data))
                elif message.type == aiohttp.WSMsgType.BINARY:
                    self.images.append(message.data)

    def queue(self, graph: dict) -> str:
        """The id of a prompt of this client."""
        answer = self._server.post("/prompt", {"prompt": graph, "client_id": self.client_id})
        assert "prompt_id" in answer, answer
        return answer["prompt_id"]

    def finish(self, prompt_id: str) -> dict:
        """The history entry of a prompt, whatever its end, once this client was told all about it."""
        entry = self._server.finish(prompt_id)
        until(lambda: {"node": None, "prompt_id": prompt_id} in self._executing(), lambda: str(self.messages))
        return entry

    def forget(self) -> None:
        """Drops the messages so far."""
        self.messages, self.images = [], []

    def _executing(self) -> list[dict]:
        return [{name: data.get(name) for name in ("node", "prompt_id")} for data in self.values("executing")]

    def values(self, kind: str) -> list[dict]:
        return [message["data"] for message in self.messages if message["type"] == kind]

    def texts(self) -> list[str]:
        """What stood on nodes: binary messages of type 3 (a node id with its length, then the text)."""
        found = [data for data in self.images if int.from_bytes(data[:4], "big") == 3]
        return [data[8 + int.from_bytes(data[4:8], "big") :].decode() for data in found]

    def pictures(self) -> list[Image.Image]:
        """Previews: binary messages of type 1 (their format, then the file)."""
        found = [data for data in self.images if int.from_bytes(data[:4], "big") == 1]
        return [Image.open(BytesIO(data[8:])) for data in found]
