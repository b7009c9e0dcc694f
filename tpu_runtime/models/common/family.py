"""The entry of a family's folder in the list of families."""

from dataclasses import dataclass

from ...formats.file_signature import FileLayout
from ...model_spec import ModelSpec
from .published_files import PublishedFiles


@dataclass(frozen=True, kw_only=True)
class Family:
    """The models of a folder, and their single files."""

    flagships: tuple[ModelSpec, ...]  # one of each kind: the README's table; examples and predictions exist for these
    # models of another size or recipe, or with more inputs; the nodes of their flagship run them
    siblings: tuple[ModelSpec, ...] = ()
    layouts: tuple[FileLayout, ...] = ()  # of its networks in single files
    files: PublishedFiles = PublishedFiles()
