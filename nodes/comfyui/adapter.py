"""ComfyUI's side: declarations as V3 node classes, progress, previews, cancel and folders."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import comfy.model_management
import folder_paths
from comfy_execution.graph_utils import GraphBuilder
from comfy_execution.validation import validate_node_input
from server import PromptServer

from ...tpu_runtime import pipeline
from .. import DECLARATIONS
from ..declare import Declaration, Expansion, Input, Link, Node, Output, Ref, in_words
from ..graphs.ran import Records
from . import about, core_loaders, errors, memory, routes
from .announce import announce
from .host import DENOISERS, ComfyHost, folders, install_pictures, weights

try:
    from comfy_api.latest import ComfyExtension, io
except ImportError:
    from comfy_api.v0_0_2 import ComfyExtension, io

log = logging.getLogger(__name__)

RECORDS = Records(frozenset(name for name, declaration in DECLARATIONS.items() if declaration.family))
_CHECKING = asyncio.Lock()  # what is queued may name files whose headers take memory: one check at a time
_WIDGETS = {"INT": io.Int, "FLOAT": io.Float, "STRING": io.String, "COMBO": io.Combo, "BOOLEAN": io.Boolean}


def _say_stuck(sentence: str) -> None:
    """The error of a prompt whose node cannot raise one any more (see `pipeline.when_stuck`)."""
    server = PromptServer.instance
    message = {
        "prompt_id": getattr(server, "last_prompt_id", None), "node_id": server.last_node_id, "node_type": "",
        "executed": [], "exception_message": sentence, "exception_type": "HostsError", "traceback": [],
        "current_inputs": [], "current_outputs": [],
    }  # fmt: skip
    server.send_sync("execution_error", message, server.client_id)


def extension() -> ComfyExtension:
    """What ComfyUI's `comfy_entrypoint` must return."""
    pipeline.bus.expect_no_tpu()
    for refusal in about.refusals():
        log.error("%s", refusal)  # as every node will
    # ComfyUI's exit code is 0 when it ends in order; nobody wants to wait minutes for that because XLA compiles.
    pipeline.leave_at_exit()
    memory.wrap_unload()
    pipeline.when_stuck(_say_stuck)
    try:
        pipeline.listen()
    except (ValueError, RuntimeError) as error:
        log.error("%s", error)  # as the first prompt will
    routes.add(RECORDS)
    install_pictures()
    declared = {**DECLARATIONS, **core_loaders.LOADERS}
    errors.install(declared)
    classes = [*(node_class(one) for one in declared.values()), TPUCollect]

    class Extension(ComfyExtension):
        async def get_node_list(self) -> list[type[io.ComfyNode]]:
            return classes

    return Extension()


def node_class(declaration: Node | Expansion) -> type[io.ComfyNode]:
    """The V3 class of a declaration."""
    body = {
        "define_schema": lambda cls: _schema(declaration),
        "execute": _expand(declaration) if isinstance(declaration, Expansion) else _execute(declaration),
        "validate_inputs": _validate(declaration),
    }
    if isinstance(declaration, Node) and declaration.fingerprint is not None:
        fingerprint = declaration.fingerprint
        names = {declared.name for declared in declaration.inputs if declared.is_widget}
        body["fingerprint_inputs"] = lambda cls, **given: fingerprint(
            folders(), **{name: value for name, value in given.items() if name in names}
        )
    return type(declaration.id, (io.ComfyNode,), {name: classmethod(function) for name, function in body.items()})


def _schema(declaration: Declaration) -> io.Schema:
    is_expansion = isinstance(declaration, Expansion)
    told: list[io.Hidden] = []
    if is_expansion:
        told = [io.Hidden.dynprompt, io.Hidden.unique_id]
    elif isinstance(declaration, Node) and (declaration.family or declaration.gives_core):
        told = [io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id]
    elif isinstance(declaration, Node):
        told = [io.Hidden.prompt]
    return _accepted(
        io.Schema,
        node_id=declaration.id,
        display_name=declaration.title,
        category=declaration.category,
        description=declaration.description,
        # ComfyUI caches by literal inputs: a descriptor passed as a value would defeat it, its link does not.
        inputs=[_input(declared, raw_link=is_expansion and not declared.is_widget) for declared in declaration.inputs],
        outputs=[_output(output, is_list=is_expansion) for output in declaration.outputs],
        # Under a family's name are models of others, too: Wan 2.2's text to video runs on the nodes of 2.1.
        search_aliases=[*declaration.aliases, *_titles(declaration.family)],
        hidden=told,
        is_output_node=isinstance(declaration, Node) and declaration.is_output,
        enable_expand=is_expansion,
        is_input_list=is_expansion,
    )


def _titles(family: str) -> list[str]:
    return [spec.title for spec in pipeline.SPECS if spec.family == family]


def _accepted(factory: Callable[..., Any], **keywords: Any) -> Any:
    """Calls `factory` without the keywords that this version of ComfyUI does not have yet."""
    known = inspect.signature(factory).parameters
    return factory(**{name: value for name, value in keywords.items() if name in known})


def _input(declared: Input, *, raw_link: bool) -> Any:
    shared = {"id": declared.name, "tooltip": in_words(declared.tooltip), "optional": declared.is_listed_optional}
    if not declared.is_widget:
        return _accepted(_socket(declared.type).Input, raw_link=raw_link or None, **shared)
    own = {
        "INT": {"min": declared.low, "max": declared.high, "step": declared.step},
        "FLOAT": {"min": declared.low, "max": declared.high, "step": declared.step},
        "STRING": {"multiline": declared.multiline, "placeholder": declared.label},
        "COMBO": {"options": _options(declared)},
    }.get(declared.type, {})
    if declared.companion == "control_after_generate":
        own["control_after_generate"] = True
    advanced = declared.advanced or None
    default = None if declared.files and not declared.options else declared.default  # the first file
    return _accepted(
        _WIDGETS[declared.type].Input,
        display_name=declared.label, default=default, advanced=advanced, **own, **shared,
    )  # fmt: skip


def _options(declared: Input) -> list[str]:
    """Files are looked for whenever the page asks, as for core's nodes."""
    if declared.files == "models":
        return _models(declared.options)
    if declared.files == "loras":
        return folder_paths.get_filename_list(declared.files)
    return [*declared.options, *(weights(declared.files) if declared.files else ())]


def _models(published: Sequence[str]) -> list[str]:
    """What needs no download before what is `published`; the miniatures last, or without a TPU first."""
    choices = pipeline.choices(folder_paths.get_folder_paths("diffusers"))
    miniatures = {spec.miniature.id for spec in pipeline.SPECS}
    small = sorted((one for one in choices if one in miniatures), key=lambda one: not pipeline.tiny.is_trained(one))
    large = [*(one for one in choices if one not in small), *weights(*DENOISERS), *published]
    return list(dict.fromkeys([*large, *small] if pipeline.bus.device_files() else [*small, *large]))


def _output(output: Output, *, is_list: bool) -> Any:
    comfy_type = _WIDGETS.get(output.type) or _socket(output.type)
    return comfy_type.Output(
        output.name, display_name=output.name, tooltip=in_words(output.tooltip), is_output_list=is_list
    )


def _socket(kind: str) -> Any:
    if kind == "*":
        return io.AnyType
    core = {
        "CONDITIONING": io.Conditioning, "LATENT": io.Latent, "IMAGE": io.Image, "VIDEO": io.Video, "MASK": io.Mask,
        "MODEL": io.Model, "CLIP": io.Clip, "VAE": io.Vae,
    }  # fmt: skip
    return core.get(kind) or io.Custom(kind)


def _execute(declaration: Node) -> Callable[..., io.NodeOutput]:
    def execute(cls: type, **given: Any) -> io.NodeOutput:
        with errors.named():
            pipeline.check_packages()
        memory.register()
        prompt = cls.hidden and cls.hidden.prompt
        announce(prompt, host := ComfyHost(prompt))
        try:
            with errors.named(), pipeline.noted() as notes:
                results = declaration.run(host, **declaration.values(given))
            host.ended()
            if declaration.family and (hidden := cls.hidden) is not None:
                saved = hidden.extra_pnginfo  # whatever the request holds
                workflow = saved.get("workflow") if isinstance(saved, dict) else None
                RECORDS.add(hidden.prompt, workflow, str(hidden.unique_id), notes)
            more = core_loaders.objects(*results) if declaration.gives_core else ()
            return io.NodeOutput(*results, *more)
        except pipeline.OutOfMemory as error:
            failure = str(error)
        finally:
            memory.set_imports_aside()
        # ComfyUI knows this one: it unloads everything, and the page says that memory ran out.
        raise comfy.model_management.OOM_EXCEPTION(failure)

    return execute


def _expand(declaration: Expansion) -> Callable[..., io.NodeOutput]:
    """ComfyUI gives every input as a list here. The stages get links to lists, and ComfyUI maps each stage over them as
    over any node: so a list maps element by element through all stages, and one that is shorter repeats its last.
    """

    def execute(cls: type, **given: Any) -> io.NodeOutput:
        links = cls.hidden.dynprompt.get_node(cls.hidden.unique_id)["inputs"]
        number = max((len(each) for each in given.values()), default=1)
        values, *_ = (
            declaration.values({name: each[min(place, len(each) - 1)] for name, each in given.items()})
            for place in range(number)
        )
        builder = GraphBuilder()
        stages = declaration.stages_for(values)
        nodes = {stage.name: builder.node(stage.node_id, id=stage.name) for stage in stages}
        for stage in stages:
            for name, value in stage.inputs.items():
                if isinstance(value, Link):
                    value = nodes[value.stage].out(value.output)
                elif isinstance(value, Ref):
                    value = links[value.input] if len(given.get(value.input, ())) > 1 else values[value.input]
                nodes[stage.name].set_input(name, value)
        collect = builder.node(TPUCollect.__name__, id="collect")
        for place, link in enumerate(declaration.results):
            collect.set_input(_PLACES[place], nodes[link.stage].out(link.output))
        results = [collect.out(place) for place in range(len(declaration.results))]
        return io.NodeOutput(*results, expand=builder.finalize())

    return execute


# As many outputs as a pipeline may have.
_PLACES = ("first", "second", "third")


class TPUCollect(io.ComfyNode):
    """What stands behind a pipeline's stages: each of their lists as one value. ComfyUI puts the values of all outputs
    in a row, so that with more than one for an output the others would be in its place.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _accepted(
            io.Schema,
            node_id=cls.__name__,
            display_name="TPU Collect",
            category="TPU",
            description="Internal part of the TPU Full Pipeline nodes; passes on the results of their stages.",
            inputs=[io.AnyType.Input(name, optional=True, tooltip="Results of a stage.") for name in _PLACES],
            outputs=[io.AnyType.Output(name) for name in _PLACES],
            is_input_list=True,
            is_dev_only=True,
        )

    @classmethod
    def execute(cls, **results: Any) -> io.NodeOutput:
        return io.NodeOutput(*(results.get(name, []) for name in _PLACES))


def _validate(declaration: Declaration) -> Callable[..., Awaitable[bool | str]]:
    """The check at queue time, for the inputs that ComfyUI cannot judge by type, range and options. It may read files
    that anyone made, so that it is off the loop that answers the page.

    ComfyUI takes the names from the signature and repeats the sentence on each of them (see `errors`), so the
    signature holds only those. Inputs that are links are None to ComfyUI, and absent here.
    """
    checked = (*declaration.checks, *declaration.checked_too)
    names = [i.name for i in declaration.inputs if i.is_grid or i.name in checked]
    if declaration.checked_links or any(i.listed_last for i in declaration.inputs):
        names.append("input_types")  # ComfyUI then leaves the links to us

    def check(input_types: Mapping[str, str] | None, constants: Mapping[str, Any]) -> bool | str:
        try:
            if input_types is not None:
                _check_links(declaration, input_types)
            declaration.check_constants(folders(), constants, input_types)
        except ValueError as error:
            return str(error)
        return True

    async def validate_inputs(cls: type, input_types: Any = None, **constants: Any) -> bool | str:
        if isinstance(declaration, Expansion):  # whose every input is a list
            input_types = input_types and input_types[0]
            constants = {name: value[0] for name, value in constants.items()}
        constants = {name: value for name, value in constants.items() if value is not None}
        async with _CHECKING:
            checked = pipeline.in_daemon(lambda: check(input_types, constants), "comfyui-tpu-check")
            return await asyncio.wrap_future(checked)

    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("cls", *names)]
    validate_inputs.__signature__ = inspect.Signature(parameters)
    return validate_inputs


def _check_links(declaration: Declaration, types: Mapping[str, str]) -> None:
    """Raises ValueError for a required socket without a link, and for a link of another type; `types` by input."""
    for declared in declaration.inputs:
        given = types.get(declared.name)
        if given is None and not declared.is_widget and not declared.optional:
            raise ValueError(f"{declaration.title}: {declared.name} is missing.")
        if given is not None and not validate_node_input(given, declared.type):
            raise ValueError(f"{declaration.title}: {declared.name} takes {declared.type}; it is linked to {given}.")
