"""What a follower does: the stages that the leader runs, with the same arguments, over its part of the chips."""

import logging
from collections.abc import Callable
from typing import Any

from ..progress import Silent
from .follower import Follower
from .place import Place
from .together import Together

log = logging.getLogger(__name__)

# What the leader asks for between stages, methods of the engine. Whatever else it asks for is a stage.
REQUESTS = ("expect", "free", "free_titled")


def follow(place: Place, make_engine: Callable[[Together], Any], chips: Callable[[Any], list[dict[str, Any]]]) -> None:
    """Joins the leader of `place` and follows it, until the process ends with that one. Raises `Refused`.

    `make_engine` is called once the chips are joined; `chips` says what the monitor shows of an engine's own.
    """
    follower = Follower(place)
    follower.join()
    engine = make_engine(follower)
    follower.own_rows = lambda: chips(engine)
    log.info("Following with %d of %d chips", len(engine.own), len(engine.devices))
    for name, arguments in follower.requests():
        if name in REQUESTS:
            getattr(engine, name)(**arguments)
            continue
        try:
            engine.run(name, **arguments, progress=Silent())
            log.info("%s: done", name)
        except Exception as error:  # whatever it is, the leader has it by now, and says it to the user
            log.info("%s: %s: %s", name, type(error).__name__, error)
