"""The pack's routes on ComfyUI's server. ComfyUI itself is used only in `add`.

`GET /tpu/stats` and `POST /tpu/free` belong to the monitor. `GET /tpu/models` returns the table of models, `GET
/tpu/about` facts about the pack and this machine. `POST /tpu/upgrade` brings a workflow of the separate packs to
today's nodes, `POST /tpu/convert` swaps ComfyUI's own loaders for those of the TPU and back, `POST /tpu/offer` returns
the loaders of a prompt that can be swapped, and its programs, and `POST /tpu/miniature` the changes that run a workflow
on tiny models.
"""

import asyncio
import functools
import json
import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from aiohttp import web

from ...tpu_runtime import api
from ...tpu_runtime.checkpoints.file_resolution import list_local_models
from ...tpu_runtime.files import parse_json
from ...tpu_runtime.messages import find_messages
from ...tpu_runtime.monitor import snapshot
from ...tpu_runtime.monitor.host_stats import run_in_daemon_thread
from ...tpu_runtime.monitor.stats_feed import StatsFeed
from .. import DECLARATIONS, model
from ..declare import Json
from ..graphs import loader_swap, tiny_models, upgrade
from ..graphs.provenance import ProvenanceLog
from ..graphs.queue_eta import QueueEstimator
from . import about

log = logging.getLogger(__name__)

# Bytes; a thousand times the size of large workflows.
MAX_WORKFLOW_BYTES = 16 * 2**20
# Core's loaders of files with a denoiser.
_DENOISER_LOADERS = frozenset(("UNETLoader", "CheckpointLoaderSimple"))
# Path of our web files on the server: it has the name of the pack's folder.
_WEB = f"/extensions/{Path(__file__).parents[2].name}/"


def install_routes(records: ProvenanceLog) -> None:
    """Add the routes, and the handlers of prompts.

    Must be called while ComfyUI imports its nodes: it copies its table of routes only once.
    """
    import folder_paths
    from server import PromptServer

    server = PromptServer.instance
    # The server creates its queue later.
    ends = functools.cache(lambda: QueueEstimator(server.prompt_queue))
    feed = StatsFeed(lambda: {**snapshot.take_snapshot(), "queue": ends().describe()})
    add_routes(
        server.routes,
        request_unload=lambda: server.prompt_queue.set_flag("unload_models", True),
        feed=feed,
        here=lambda: list_local_models(folder_paths.get_folder_paths("diffusers")),
    )
    server.app.on_response_prepare.append(_keep_modules_fresh)
    server.add_on_prompt_handler(lambda data: _begin(_upgrade_prompt(data), records))


def add_routes(
    routes: web.RouteTableDef,
    *,
    request_unload: Callable[[], None],
    feed: StatsFeed | None = None,
    free: Callable[..., object] = api.free_memory,
    here: Callable[[], Collection[str]] = tuple,
) -> None:
    """Add the handlers to `routes`.

    request_unload: ComfyUI's own "unload models", which runs between prompts, never inside one.
    feed: of the monitor's statistics; None: a new one.
    free: frees residents by id.
    here: returns the models that need no download.
    """
    feed, free_worker = feed or StatsFeed(), _FreeWorker(free)
    upgrading = asyncio.Lock()  # one at a time: a large workflow needs seconds, and memory

    @routes.get("/tpu/stats")
    async def stats(request: web.Request) -> web.Response:
        body = await feed.answer()
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})

    @routes.get("/tpu/models")
    async def models(request: web.Request) -> web.Response:
        return web.json_response(model.build_catalogue(await asyncio.to_thread(here)))

    @routes.get("/tpu/about")
    async def about_pack(request: web.Request) -> web.Response:
        return _respond(await asyncio.to_thread(about.describe_pack))

    @routes.post("/tpu/free")
    async def free_memory(request: web.Request) -> web.Response:
        try:
            ids = _ids(await _read_body(request))
        except ValueError as error:
            return _respond({"error": str(error)}, status=400)
        if ids is None:
            request_unload()
            return web.json_response({"freed": "requested"})
        await free_worker.free(ids)
        return web.json_response({"freed": list(ids)})

    async def apply(request: web.Request, change: Callable[[Json], Json]) -> web.Response:
        """Answer with the result of `change` for the body."""
        try:
            body = await _read_body(request)
            async with upgrading:
                result = await asyncio.to_thread(lambda: change(_json(body)))
        except ValueError as error:
            return _respond({"error": str(error)}, status=400)
        return _respond(result)

    for name, change in {
        "upgrade": _upgrade,
        "convert": _convert,
        "offer": _offer,
        "miniature": tiny_models.describe_tiny_changes,
    }.items():
        routes.post(f"/tpu/{name}")(functools.partial(apply, change=change))


def _respond(answer: dict[str, Json], status: int = 200) -> web.Response:
    """Return `answer` as JSON, with its messages."""
    found = find_messages(answer)
    return web.json_response({**answer, "messages": found} if found else answer, status=status)


class _FreeWorker:
    """Frees residents in one thread for all requests.

    Freeing waits for a running stage, perhaps for minutes, and the client may have disconnected by then.
    """

    def __init__(self, free: Callable[..., object]) -> None:
        self._free = free
        self._requested: set[str] = set()
        self._round: asyncio.Future[None] | None = None

    async def free(self, ids: Iterable[str]) -> None:
        self._requested.update(ids)
        if self._round is None:
            self._round = asyncio.ensure_future(self._work())
        await asyncio.shield(self._round)

    async def _work(self) -> None:
        try:
            while self._requested:
                ids, self._requested = tuple(sorted(self._requested)), set()
                # In a thread of its own, not of the loop's small pool.
                await asyncio.wrap_future(run_in_daemon_thread(lambda ids=ids: self._free(ids=ids), "comfyui-tpu-free"))
        finally:
            self._round = None


async def _read_body(request: web.Request) -> bytes:
    """Read the body. Raises ValueError for one that is longer than any workflow, without reading the rest."""
    body = bytearray()
    async for piece in request.content.iter_chunked(2**16):
        body += piece
        if len(body) > MAX_WORKFLOW_BYTES:
            raise ValueError(f"The body is longer than {MAX_WORKFLOW_BYTES // 2**20} MiB, which no workflow is.")
    return bytes(body)


def _upgrade(workflow: Json) -> dict[str, Json]:
    """Return the workflow with today's nodes if any is older, and the changes; ValueError if it is not a workflow."""
    upgraded, changes = upgrade.upgrade_workflow(workflow, DECLARATIONS)
    return {"changes": changes, **({"workflow": upgraded} if changes else {})}


def _json(body: bytes) -> Json:
    try:
        return parse_json(body)
    except ValueError as error:
        raise ValueError(f"The body is not a workflow in JSON ({error}).") from None


def _convert(body: Json) -> dict[str, Json]:
    """Return the workflow in `{"workflow": ..., "back": false}` with loaders swapped, and the changes."""
    if not isinstance(body, dict) or not isinstance(body.get("back", False), bool):
        raise ValueError('The body must be {"workflow": ..., "back": true or false}.')
    from .host import comfyui_folders

    converted, changes = loader_swap.swap_loaders(
        body.get("workflow"), comfyui_folders().models, back=body.get("back", False)
    )
    return {"changes": changes, "workflow": converted}


def _offer(prompt: Json) -> dict[str, Json]:
    """Return the swaps of a prompt's loaders as sentences, and the programs of the swapped prompt.

    Both are empty if no loader of a denoiser can be swapped.
    """
    from .host import comfyui_folders
    from .precompile import list_programs

    converted, changes = loader_swap.swap_loaders(prompt, comfyui_folders().models)
    denoisers = [
        node_id
        for node_id, node in prompt.items()
        if isinstance(node, dict) and str(node.get("class_type")) in _DENOISER_LOADERS and converted[node_id] != node
    ]
    if not denoisers:
        return {"changes": [], "programs": []}
    return {"changes": list(map(loader_swap.describe_offer, changes)), "programs": list_programs(converted)}


def _upgrade_prompt(data: dict[str, Json]) -> dict[str, Json]:
    """Upgrade the nodes of a prompt that a script is about to queue."""
    prompt, changes = upgrade.upgrade_workflow(data.get("prompt"), DECLARATIONS)
    if changes:
        for change in changes:
            log.warning("%s", change)
    return {**data, "prompt": prompt} if changes else data


def _begin(data: dict[str, Json], records: ProvenanceLog) -> dict[str, Json]:
    """Reset the notes in the workflow of a prompt that is about to be queued to those of this prompt."""
    extra = data.get("extra_data")
    saved = extra.get("extra_pnginfo") if isinstance(extra, dict) else None
    if isinstance(saved, dict):
        records.begin(data.get("prompt"), saved.get("workflow"))
    return data


def _ids(content: bytes) -> tuple[str, ...] | None:
    """Return the ids to free from a body; None for everything. Raises ValueError if the body is invalid."""
    if not content.strip():
        return None
    expected = 'it must be empty, or {"ids": ["..."]} with ids from "resident" in /tpu/stats.'
    try:
        body = parse_json(content)
    except ValueError as error:
        raise ValueError(f"The body is not JSON ({error}); {expected}") from None
    if not isinstance(body, dict) or set(body) - {"ids"}:
        raise ValueError(f"The body is {json.dumps(body)[:80]}; {expected}")
    ids = body.get("ids")
    if ids is not None and (not isinstance(ids, list) or not all(isinstance(id, str) for id in ids)):
        raise ValueError(f"ids is {json.dumps(ids)[:80]}; {expected}")
    return None if ids is None else tuple(ids)


async def _keep_modules_fresh(request: web.Request, response: web.StreamResponse) -> None:
    """Forbid caching of .mjs, as ComfyUI does for .js: after an update the page would mix old modules with new ones."""
    if request.path.endswith(".mjs") and _WEB in request.path:
        response.headers.setdefault("Cache-Control", "no-cache")
