"""A running server while a stranger's prompt is looked at, and after a library ended a node: it goes on."""

import threading
import time
from collections.abc import Callable

import pytest
from comfyui_tpu.tests.support.comfyui_server import Server, needs_comfyui, tiny_workflow

pytestmark = needs_comfyui

# A neighbour pack. A check waits until it is let go; a node ends as Rust's code ends one that panics.
PROBE = """
    import gc, sys, threading
    from aiohttp import web
    from server import PromptServer

    held, let_go = threading.Event(), threading.Event()

    def ours(name):
        return next(module for path, module in list(sys.modules.items()) if path.endswith(name))

    @PromptServer.instance.routes.get("/probe/hold")
    async def hold(request):
        declare, held_at = ours(".nodes.declare"), request.query["model"]
        check = declare.Declaration.validate_constants

        def waits(self, folders, constants, linked=None):
            if constants.get("model_id") == held_at:
                held.set()
                assert let_go.wait(300)
            return check(self, folders, constants, linked)

        declare.Declaration.validate_constants = waits
        return web.json_response({})

    @PromptServer.instance.routes.get("/probe/held")
    async def is_held(request):
        return web.json_response({"held": held.is_set()})

    @PromptServer.instance.routes.get("/probe/go")
    async def go(request):
        let_go.set()
        return web.json_response({})

    @PromptServer.instance.routes.get("/probe/garbage")
    async def garbage(request):
        return web.json_response({"aside": gc.get_freeze_count(), "searched": len(gc.get_objects())})

    @PromptServer.instance.routes.get("/probe/interval")
    async def interval(request):
        return web.json_response({"seconds": sys.getswitchinterval()})

    PanicException = type("PanicException", (BaseException,), {})

    @PromptServer.instance.routes.get("/probe/panic")
    async def panic(request):
        node = sys.modules[ours(".nodes.declare").__package__].DECLARATIONS["Wan21TextEncoder"]
        run = node.run

        def panics(host, **given):
            object.__setattr__(node, "run", run)
            raise PanicException("Onig: Regex search error")

        object.__setattr__(node, "run", panics)
        return web.json_response({})

    NODE_CLASS_MAPPINGS = {}
"""


@pytest.fixture(scope="module")
def server(start_comfyui: Callable[..., Server]) -> Server:
    return start_comfyui(packs={"probe": PROBE})


def test_stats_endpoint_answers_during_prompt_validation(server: Server):
    """The check ends only once the page was answered: on one loop with it, that would never be."""
    model_id = "no such model + nothing.safetensors"
    workflow = {"1": {"class_type": "TPUModelLoader", "inputs": {"model_id": model_id, "family": "Wan21"}}}
    workflow |= {"2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}}}
    server.get(f"/probe/hold?model={model_id.replace(' ', '%20').replace('+', '%2B')}")
    answers: list[dict] = []
    asking = threading.Thread(target=lambda: answers.append(server.queue(workflow)), daemon=True)
    asking.start()
    while not server.get("/probe/held")["held"]:
        assert asking.is_alive(), answers
    assert "chips" in server.get("/tpu/stats") and not answers
    server.get("/probe/go")
    asking.join(300)
    assert "There is no file nothing.safetensors" in str(answers[0]["node_errors"])


def test_server_runs_prompts_after_node_panic(server: Server):
    server.get("/probe/panic")
    workflow = tiny_workflow("after_a_panic")
    failed = server.finish(server.queue(workflow)["prompt_id"])
    assert failed["status"]["status_str"] == "error"
    assert "A library failed within the node (PanicException: Onig" in str(failed["status"]["messages"])
    server.run(workflow)


def test_garbage_collection_skips_imported_objects(server: Server):
    """It took half a second, every ten seconds, in which the page stood still."""
    server.run(tiny_workflow("imported", seed=8))
    found = server.get("/probe/garbage")
    assert found["aside"] > 300_000 and found["searched"] < 200_000, found


def test_page_thread_waits_a_millisecond_for_each_busy_thread(server: Server):
    assert server.get("/probe/interval")["seconds"] == pytest.approx(0.001)


def test_prompt_runs_during_hundreds_of_requests(server: Server):
    """Each is answered, from one sample, and the prompt ends well."""
    done, answers, paths = threading.Event(), [], ("/tpu/stats", "/tpu/models", "/tpu/about", "/tpu/stats")

    def ask(path: str) -> None:
        while not done.is_set() or len(answers) < 400:
            answers.append(bool(server.get(path)))
            time.sleep(0.02)  # two hundred a second, of four who ask

    asking = [threading.Thread(target=ask, args=(path,), daemon=True) for path in paths]
    for thread in asking:
        thread.start()
    server.run(tiny_workflow("under_load", seed=7))
    done.set()
    for thread in asking:
        thread.join(120)
    assert len(answers) >= 400 and all(answers)
