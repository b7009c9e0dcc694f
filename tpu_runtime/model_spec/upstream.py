"""Types of what diffusers and transformers supply, where no type checker knows more."""

from collections.abc import Mapping
from typing import Any

# A network of upstream or one of its layers. Attributes have upstream's names; torch sets them where no checker looks.
Net = Any
# The `config.json` of one of upstream's networks or schedulers, parsed.
UpstreamConfig = Mapping[str, Any]
