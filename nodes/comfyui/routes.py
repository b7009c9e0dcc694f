"""The pack's addresses on ComfyUI's server: the monitor's `GET /tpu/stats` and `POST /tpu/free`; `GET /tpu/models`,
what the page knows of a model by its id; `GET /tpu/about`, what it says of the pack and this machine; `POST
/tpu/upgrade`, which brings a workflow of the separate packs to today's nodes; `POST /tpu/convert`, which swaps loaders
of ComfyUI's own for those of the TPU and back; `POST /tpu/miniature`, which says how to try one without its models.

It knows ComfyUI only in `add`.
"""

import asyncio
import functools
import json
import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from aiohttp import web

from ...tpu_runtime import pipeline
from ...tpu_runtime.pipeline import Feed, in_daemon, parse_json
from .. import DECLARATIONS, model
from ..graphs import miniature, upgrade
from ..graphs.queue_end import QueueEnd
from ..graphs.ran import Records
from . import about

log = logging.getLogger(__name__)

# Bytes: a thousand times what large ones have.
LONGEST_WORKFLOW = 16 * 2**20
# Where ComfyUI serves our web files: under the name of the folder it found us in.
_WEB = f"/extensions/{Path(__file__).parents[2].name}/"


def add(records: Records) -> None:
    """Adds the routes, and what looks at prompts; must be called while ComfyUI imports its nodes, it copies its table
    of routes only once.
    """
    import folder_paths
    from server import PromptServer

    server = PromptServer.instance
    # The server has its queue later.
    ends = functools.cache(lambda: QueueEnd(server.prompt_queue))
    feed = Feed(lambda: {**pipeline.snapshot.stats(), "queue": ends().describe()})
    add_routes(
        server.routes,
        request_unload=lambda: server.prompt_queue.set_flag("unload_models", True),
        feed=feed,
        here=lambda: pipeline.choices(folder_paths.get_folder_paths("diffusers")),
    )
    server.app.on_response_prepare.append(_keep_modules_fresh)
    server.add_on_prompt_handler(lambda data: _begin(_upgrade_prompt(data), records))


def add_routes(
    routes: web.RouteTableDef,
    *,
    request_unload: Callable[[], None],
    feed: Feed | None = None,
    free: Callable[..., Any] = pipeline.free,
    here: Callable[[], Collection[str]] = tuple,
) -> None:
    """The handlers. `request_unload` is ComfyUI's own "unload models", which runs between prompts, never inside one.
    `here` says which models need no download.
    """
    feed, freeing = feed or Feed(), _Freeing(free)
    upgrading = asyncio.Lock()  # a large workflow takes seconds, and memory: one at a time

    @routes.get("/tpu/stats")
    async def stats(request: web.Request) -> web.Response:
        body = await feed.answer()
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})

    @routes.get("/tpu/models")
    async def models(request: web.Request) -> web.Response:
        return web.json_response(model.catalogue(await asyncio.to_thread(here)))

    @routes.get("/tpu/about")
    async def about_pack(request: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(about.everything))

    @routes.post("/tpu/free")
    async def free_memory(request: web.Request) -> web.Response:
        try:
            ids = _ids(await _bounded(request))
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        if ids is None:
            request_unload()
            return web.json_response({"freed": "requested"})
        await freeing.of(ids)
        return web.json_response({"freed": list(ids)})

    async def changed(request: web.Request, change: Callable[[Any], dict[str, Any]]) -> web.Response:
        """What `change` makes of the body."""
        try:
            body = await _bounded(request)
            async with upgrading:
                found = await asyncio.to_thread(lambda: change(_json(body)))
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response(found)

    for name, change in {"upgrade": _upgraded, "convert": _converted, "miniature": miniature.changes}.items():
        routes.post(f"/tpu/{name}")(functools.partial(changed, change=change))


class _Freeing:
    """Frees residents in one thread, however many ask meanwhile: that waits for a running stage, perhaps for minutes,
    and who asked may be gone by then.
    """

    def __init__(self, free: Callable[..., Any]) -> None:
        self._free = free
        self._wanted: set[str] = set()
        self._round: asyncio.Future[None] | None = None

    async def of(self, ids: Iterable[str]) -> None:
        self._wanted.update(ids)
        if self._round is None:
            self._round = asyncio.ensure_future(self._work())
        await asyncio.shield(self._round)

    async def _work(self) -> None:
        try:
            while self._wanted:
                ids, self._wanted = tuple(sorted(self._wanted)), set()
                # Not with a thread of the loop's small pool.
                await asyncio.wrap_future(in_daemon(lambda ids=ids: self._free(ids=ids), "comfyui-tpu-free"))
        finally:
            self._round = None


async def _bounded(request: web.Request) -> bytes:
    """The body; ValueError for one that is longer than any workflow's, of which no more is read."""
    body = bytearray()
    async for piece in request.content.iter_chunked(2**16):
        body += piece
        if len(body) > LONGEST_WORKFLOW:
            raise ValueError(f"The body is longer than {LONGEST_WORKFLOW // 2**20} MiB, which no workflow is.")
    return bytes(body)


def _upgraded(workflow: Any) -> dict[str, Any]:
    """The workflow with today's nodes where any is older, and what was changed; ValueError for what is none."""
    found, changes = upgrade.upgraded(workflow, DECLARATIONS)
    return {"changes": changes, **({"workflow": found} if changes else {})}


def _json(body: bytes) -> Any:
    try:
        return parse_json(body)
    except ValueError as error:
        raise ValueError(f"The body is not a workflow in JSON ({error}).") from None


def _converted(asked: Any) -> dict[str, Any]:
    """The workflow in `{"workflow": ..., "back": false}` with loaders swapped, and what was done."""
    if not isinstance(asked, dict) or not isinstance(asked.get("back", False), bool):
        raise ValueError('The body must be {"workflow": ..., "back": true or false}.')
    from .host import folders

    found, changes = upgrade.with_tpu_loaders(asked.get("workflow"), folders().models, back=asked.get("back", False))
    return {"changes": changes, "workflow": found}


def _upgrade_prompt(data: dict[str, Any]) -> dict[str, Any]:
    """What is about to be queued, as scripts send it, with today's nodes."""
    prompt, changes = upgrade.upgraded(data.get("prompt"), DECLARATIONS)
    if changes:
        for change in changes:
            log.warning("%s", change)
    return {**data, "prompt": prompt} if changes else data


def _begin(data: dict[str, Any], records: Records) -> dict[str, Any]:
    """What is about to be queued, its workflow with notes of this prompt alone."""
    extra = data.get("extra_data")
    saved = extra.get("extra_pnginfo") if isinstance(extra, dict) else None
    if isinstance(saved, dict):
        records.begin(data.get("prompt"), saved.get("workflow"))
    return data


def _ids(content: bytes) -> tuple[str, ...] | None:
    """What to free; None for everything. ValueError with a sentence when the body is something else."""
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
    if ids is not None and (not isinstance(ids, list) or not all(isinstance(one, str) for one in ids)):
        raise ValueError(f"ids is {json.dumps(ids)[:80]}; {expected}")
    return None if ids is None else tuple(ids)


async def _keep_modules_fresh(request: web.Request, response: web.StreamResponse) -> None:
    """ComfyUI forbids caching of .js but not of .mjs: after an update the page would mix old modules with new ones."""
    if request.path.endswith(".mjs") and _WEB in request.path:
        response.headers.setdefault("Cache-Control", "no-cache")
