"""The networks of any checkpoint as single files have them: by the names of their makers, with the tokenizers that such
files carry along.
"""

from collections.abc import Mapping
from dataclasses import replace

from ..files import CheckpointError, TensorFile
from ..formats import names, tokenizer_files
from ..formats.contents import Contents, Held
from ..model_spec import Component, Table
from ..models.layouts import LAYOUTS
from ..progress import Progress
from . import assembled, checkpoint
from .model_ref import ModelRef


def network(model: ModelRef, name: str, progress: Progress) -> Held:
    """The component `name` of a model, with its tensors by its makers' names; its weights are fetched where need be.

    `CheckpointError` where the model's files do not hold it.
    """
    found, component = model.locate(), replace(model.spec.component(name), only=())
    if found.is_partial and found.root is not None and not (found.root / component.folder).is_dir():
        raise CheckpointError(
            f"{model.model_id} holds no {component.class_name}. Choose another file, or another loader."
        )
    folder = found.fetch_weights(component, progress)
    if (held := assembled.source_of(folder)) is not None:
        return held
    config = found.config(component, progress)
    layout = next(layout for layout in LAYOUTS if layout.class_name == component.class_name)
    own = checkpoint.by_own_names(checkpoint.read_headers(folder, component), component.aliases)
    tensors = names.originals(own, _table(component, own))
    first = next(iter(own.values()))
    flags = (tensor for key, tensor in layout.flags.items() if config.get(key))
    tensors |= {name: TensorFile(path=first.path, name=name, shape=(0,)) for name in flags}
    return Held(contents=Contents(path=folder, tensors=tensors, metadata={}), prefix="", layout=layout, tensors=tensors)


def _table(component: Component, own: Mapping[str, TensorFile]) -> Table:
    tables = (one.table for one in LAYOUTS if one.class_name == component.class_name and one.table is not None)
    table = next(tables, None)
    return component.makers_names if table is None else table(own)


def tokenizers(model: ModelRef, progress: Progress) -> dict[str, bytes]:
    """The contents of tokenizers that a model's files carry along, or that its folders have as files carry them, by the
    tensor's name there.
    """
    found, carried = model.locate(), {}
    for text in model.spec.text_encoders:
        component = model.spec.component(text.component)
        if not found.is_partial or found.root is None or (found.root / component.folder).is_dir():
            held = assembled.source_of(found.folder(component.folder, progress))
            if held is not None:
                carried |= tokenizer_files.carried(held.path, held.contents.tensors)
        if not carried and not found.is_partial:
            carried |= tokenizer_files.of_folder(found.folder(text.tokenizer_folder, progress))
    return carried
