"""Connects ComfyUI: declarations as V3 node classes, checks at queue time, execution."""

import asyncio
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import comfy.model_management
import folder_paths
from comfy_execution.graph_utils import GraphBuilder
from comfy_execution.validation import validate_node_input
from server import PromptServer

from ...tpu_runtime import api
from ...tpu_runtime.checkpoints import tiny
from ...tpu_runtime.checkpoints.file_resolution import list_local_models
from ...tpu_runtime.engine.lifecycle import listen_for_hosts, on_fatal, register_exit
from ...tpu_runtime.engine.memory_advice import OutOfMemory
from ...tpu_runtime.machine import pci
from ...tpu_runtime.messages import compose, compose_term
from ...tpu_runtime.models import SPECS
from ...tpu_runtime.monitor.host_stats import run_in_daemon_thread
from .. import DECLARATIONS
from ..declare import Declaration, Expansion, Input, Link, Node, Output, Ref, Value, Values, with_display_names
from ..graphs.provenance import ProvenanceLog
from . import about, core_loaders, errors, memory, routes
from .host import DENOISERS, ComfyContext, comfyui_folders, install_example_images, list_weight_files, send_messages
from .precompile import observe_nodes, precompile

try:
    from comfy_api.latest import ComfyExtension, io
except ImportError:
    from comfy_api.v0_0_2 import ComfyExtension, io

log = logging.getLogger(__name__)

PROVENANCE = ProvenanceLog(frozenset(name for name, declaration in DECLARATIONS.items() if declaration.family))
_CHECKING = asyncio.Lock()  # one check at a time: it may read headers of files, which need memory
Made = TypeVar("Made")
_WIDGETS = {"INT": io.Int, "FLOAT": io.Float, "STRING": io.String, "COMBO": io.Combo, "BOOLEAN": io.Boolean}


def _report_fatal(sentence: str) -> None:
    """Send the error of a prompt whose node can no longer raise one (see `api.on_fatal`)."""
    server = PromptServer.instance
    message = {
        "prompt_id": getattr(server, "last_prompt_id", None), "node_id": server.last_node_id, "node_type": "",
        "executed": [], "exception_message": sentence, "exception_type": "HostsError", "traceback": [],
        "current_inputs": [], "current_outputs": [],
    }  # fmt: skip
    send_messages(sentence, server.client_id)
    server.send_sync("execution_error", message, server.client_id)


# Seconds for which a Python thread holds the interpreter lock while others wait. Threads that trace or load may each
# have a turn before the page's thread, several times for one answer. Python's own 5 ms made that a third of a second.
SWITCH_INTERVAL_S = 0.001


def extension() -> ComfyExtension:
    """Return the value of ComfyUI's `comfy_entrypoint`."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
    pci.configure_without_tpu()
    for refusal in about.find_package_problems():
        log.error("%s", refusal)  # every node will raise the same
    # ComfyUI's exit code is 0 after an orderly end, which must not wait minutes for XLA to finish compiling.
    register_exit()
    memory.wrap_unload()
    on_fatal(_report_fatal)
    try:
        listen_for_hosts()
    except (ValueError, RuntimeError) as error:
        log.error("%s", error)  # the first prompt will raise the same
    routes.install_routes(PROVENANCE)
    install_example_images()
    observe_nodes()
    declared = {**DECLARATIONS, **core_loaders.LOADERS}
    errors.install_error_merging(declared)
    errors.install_error_messages()
    classes = [*map(node_class, declared.values()), TPUCollect]
    memory.set_imports_aside()  # those of ComfyUI, while nobody waits for its page

    class Extension(ComfyExtension):
        async def get_node_list(self) -> list[type[io.ComfyNode]]:
            return classes

    return Extension()


def node_class(declaration: Node | Expansion) -> type[io.ComfyNode]:
    """Return the V3 class of a declaration."""
    body = {
        "define_schema": lambda cls: _schema(declaration),
        "execute": _expand(declaration) if isinstance(declaration, Expansion) else _execute(declaration),
        "validate_inputs": _validate(declaration),
    }
    if isinstance(declaration, Node) and declaration.fingerprint is not None:
        fingerprint = declaration.fingerprint
        names = {declared.name for declared in declaration.inputs if declared.is_widget}
        body["fingerprint_inputs"] = lambda cls, **given: fingerprint(
            comfyui_folders(), **{name: value for name, value in given.items() if name in names}
        )
    return type(declaration.id, (io.ComfyNode,), {name: classmethod(function) for name, function in body.items()})


def _schema(declaration: Declaration) -> io.Schema:
    is_expansion = isinstance(declaration, Expansion)
    hidden: list[io.Hidden] = []
    if is_expansion:
        hidden = [io.Hidden.dynprompt, io.Hidden.unique_id]
    elif isinstance(declaration, Node) and (declaration.family or declaration.gives_core):
        hidden = [io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id]
    elif isinstance(declaration, Node):
        hidden = [io.Hidden.prompt]
    return _call_supported(
        io.Schema,
        node_id=declaration.id,
        display_name=declaration.title,
        category=declaration.category,
        description=declaration.description,
        # ComfyUI caches by literal inputs: an object passed as a value would defeat the cache, its link does not.
        inputs=[_input(declared, raw_link=is_expansion and not declared.is_widget) for declared in declaration.inputs],
        outputs=[_output(output, is_list=is_expansion) for output in declaration.outputs],
        # A family also has models with other names: Wan 2.2's text to video runs on the nodes of 2.1.
        search_aliases=[*declaration.aliases, *_titles(declaration.family)],
        hidden=hidden,
        is_output_node=isinstance(declaration, Node) and declaration.is_output,
        enable_expand=is_expansion,
        is_input_list=is_expansion,
    )


def _titles(family: str) -> list[str]:
    return [spec.title for spec in SPECS if spec.family == family]


def _call_supported(factory: Callable[..., Made], **keywords: Value) -> Made:
    """Call `factory` without the keywords that this version of ComfyUI does not have yet."""
    known = inspect.signature(factory).parameters
    return factory(**{name: value for name, value in keywords.items() if name in known})


def _input(declared: Input, *, raw_link: bool) -> "io.Input":
    shared = {
        "id": declared.name,
        "tooltip": with_display_names(declared.tooltip),
        "optional": declared.is_listed_optional,
    }
    if not declared.is_widget:
        return _call_supported(_socket(declared.type).Input, raw_link=raw_link or None, **shared)
    specific = {
        "INT": {"min": declared.low, "max": declared.high, "step": declared.step},
        "FLOAT": {"min": declared.low, "max": declared.high, "step": declared.step},
        "STRING": {"multiline": declared.multiline, "placeholder": declared.label},
        "COMBO": {"options": _options(declared)},
    }.get(declared.type, {})
    if declared.companion == "control_after_generate":
        specific["control_after_generate"] = True
    advanced = declared.advanced or None
    default = None if declared.files and not declared.options else declared.default  # the first file
    return _call_supported(
        _WIDGETS[declared.type].Input,
        display_name=declared.label, default=default, advanced=advanced, **specific, **shared,
    )  # fmt: skip


def _options(declared: Input) -> list[str]:
    """Return the choices of a COMBO; files are looked up whenever the page asks, as for core's nodes."""
    if declared.files == "models":
        return _models(declared.options)
    if declared.files == "loras":
        return folder_paths.get_filename_list(declared.files)
    return [*declared.options, *(list_weight_files(declared.files) if declared.files else ())]


def _models(published: Sequence[str]) -> list[str]:
    """Return the models that need no download, then the `published` ones; tiny models last, or first without a TPU."""
    choices = list_local_models(folder_paths.get_folder_paths("diffusers"))
    miniatures = {spec.miniature.id for spec in SPECS}
    small = sorted(
        (choice for choice in choices if choice in miniatures), key=lambda choice: not tiny.is_trained(choice)
    )
    large = [*(choice for choice in choices if choice not in small), *list_weight_files(*DENOISERS), *published]
    return list(dict.fromkeys([*large, *small] if pci.find_device_files() else [*small, *large]))


def _output(output: Output, *, is_list: bool) -> "io.Output":
    comfy_type = _WIDGETS.get(output.type) or _socket(output.type)
    return comfy_type.Output(
        output.name, display_name=output.name, tooltip=with_display_names(output.tooltip), is_output_list=is_list
    )


def _socket(kind: str) -> "type[io.ComfyTypeIO]":
    if kind == "*":
        return io.AnyType
    core = {
        "CONDITIONING": io.Conditioning, "LATENT": io.Latent, "IMAGE": io.Image, "VIDEO": io.Video, "MASK": io.Mask,
        "MODEL": io.Model, "CLIP": io.Clip, "VAE": io.Vae,
    }  # fmt: skip
    return core.get(kind) or io.Custom(kind)


def _execute(declaration: Node) -> Callable[..., io.NodeOutput]:
    def execute(cls: type, **given: Value) -> io.NodeOutput:
        with errors.shorten_error_names():
            api.check_packages()
        memory.register()
        prompt = cls.hidden and cls.hidden.prompt
        precompile(prompt, host := ComfyContext(prompt))
        try:
            with errors.shorten_error_names(), api.record_stages() as notes:
                results = declaration.run(host, **declaration.values(given))
            host.show_duration()
            if declaration.family and (hidden := cls.hidden) is not None:
                saved = hidden.extra_pnginfo  # unchecked: part of the request
                workflow = saved.get("workflow") if isinstance(saved, dict) else None
                PROVENANCE.add(hidden.prompt, workflow, str(hidden.unique_id), notes)
            send_messages(results, PromptServer.instance.client_id)
            more = core_loaders.make_core_objects(*results) if declaration.gives_core else ()
            return io.NodeOutput(*results, *more)
        except OutOfMemory as error:
            failure = str(error)
        finally:
            memory.set_imports_aside()
        # For this exception ComfyUI unloads everything, and its page reports that memory ran out.
        raise comfy.model_management.OOM_EXCEPTION(failure)

    return execute


def _expand(declaration: Expansion) -> Callable[..., io.NodeOutput]:
    """Return the function that expands a pipeline into its stages.

    ComfyUI passes every input as a list. The stages get links to lists, and ComfyUI maps each stage over them as over
    any node: a list maps element by element through all stages, and a shorter one repeats its last element.
    """

    def execute(cls: type, **given: Value) -> io.NodeOutput:
        links = cls.hidden.dynprompt.get_node(cls.hidden.unique_id)["inputs"]
        number = max(map(len, given.values()), default=1)
        values, *_ = (
            declaration.values({name: values[min(index, len(values) - 1)] for name, values in given.items()})
            for index in range(number)
        )
        builder = GraphBuilder()
        stages = declaration.active_stages(values)
        nodes = {stage.name: builder.node(stage.node_id, id=stage.name) for stage in stages}
        for stage in stages:
            for name, value in stage.inputs.items():
                if isinstance(value, Link):
                    value = nodes[value.stage].out(value.output)
                elif isinstance(value, Ref):
                    value = links[value.input] if len(given.get(value.input, ())) > 1 else values[value.input]
                nodes[stage.name].set_input(name, value)
        collect = builder.node(TPUCollect.__name__, id="collect")
        for index, link in enumerate(declaration.results):
            collect.set_input(_RESULTS[index], nodes[link.stage].out(link.output))
        results = [collect.out(index) for index in range(len(declaration.results))]
        return io.NodeOutput(*results, expand=builder.finalize())

    return execute


# Names of the outputs, as many as a pipeline may have.
_RESULTS = ("first", "second", "third")


class TPUCollect(io.ComfyNode):
    """Collects the results of a pipeline's stages, each list as one value.

    ComfyUI concatenates the values of all outputs; with several values for one output the others would be misplaced.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _call_supported(
            io.Schema,
            node_id=cls.__name__,
            display_name="TPU Collect",
            category="TPU",
            description="Internal part of the TPU Full Pipeline nodes; passes on the results of their stages.",
            inputs=[io.AnyType.Input(name, optional=True, tooltip="Results of a stage.") for name in _RESULTS],
            outputs=[io.AnyType.Output(name) for name in _RESULTS],
            is_input_list=True,
            is_dev_only=True,
        )

    @classmethod
    def execute(cls, **results: Value) -> io.NodeOutput:
        return io.NodeOutput(*(results.get(name, []) for name in _RESULTS))


def _validate(declaration: Declaration) -> Callable[..., Awaitable[bool | str]]:
    """Return the check at queue time, for inputs that ComfyUI cannot check by type, range and options.

    It may read untrusted files, so it does not run on the event loop that answers the page. ComfyUI takes the names
    from the signature and repeats the sentence on each of them (see `errors`), so the signature has only those. Inputs
    that are links are None to ComfyUI, and absent here.
    """
    checked = (*declaration.checks, *declaration.also_validated_inputs)
    names = [i.name for i in declaration.inputs if i.is_grid or i.name in checked]
    if declaration.validated_links or any(i.listed_last for i in declaration.inputs):
        names.append("input_types")  # ComfyUI then leaves checks of links to us

    def check(input_types: Mapping[str, str] | None, constants: Values) -> bool | str:
        try:
            if input_types is not None:
                _check_links(declaration, input_types)
            declaration.validate_constants(comfyui_folders(), constants, input_types)
        except ValueError as error:
            return str(error)
        return True

    async def validate_inputs(cls: type, input_types: Value = None, **constants: Value) -> bool | str:
        if isinstance(declaration, Expansion):  # every input is a list
            input_types = input_types and input_types[0]
            constants = {name: value[0] for name, value in constants.items()}
        constants = {name: value for name, value in constants.items() if value is not None}
        async with _CHECKING:
            checked = run_in_daemon_thread(lambda: check(input_types, constants), "comfyui-tpu-check")
            return errors.keep_refusal(await asyncio.wrap_future(checked))

    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("cls", *names)]
    validate_inputs.__signature__ = inspect.Signature(parameters)
    return validate_inputs


def _check_links(declaration: Declaration, types: Mapping[str, str]) -> None:
    """Raise ValueError for a required socket without a link, and for a link of another type.

    types: of the linked outputs, by input name.
    """
    for declared in declaration.inputs:
        linked_type = types.get(declared.name)
        if linked_type is None and not declared.is_widget and not declared.optional:
            raise ValueError(
                compose("node.input_missing", title=declaration.title, name=compose_term("input", declared.name))
            )
        if linked_type is not None and not validate_node_input(linked_type, declared.type):
            raise ValueError(compose(
                "node.link_type_wrong", title=declaration.title, name=compose_term("input", declared.name),
                type=declared.type, linked_type=linked_type,
            ))  # fmt: skip
