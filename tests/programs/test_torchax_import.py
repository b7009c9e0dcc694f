"""torchax's tables name operators of older torch: which of them this torch lacks, and what a newer one may lack."""

import os
import subprocess
import sys
import threading
from textwrap import dedent

import pytest
import torch
from comfyui_tpu.tpu_runtime.programs import torch_bridge

named = torch_bridge._name_removed_operators


def refuses(namespace: object, name: str) -> bool:
    try:
        getattr(namespace, name)
    except AttributeError:
        return True
    return False


@pytest.mark.parametrize("overload", ["default", "out", "dim_Dimname"])
def test_removed_operator_is_a_placeholder_during_torchax_import(overload: str):
    with named():
        found = getattr(torch.ops.aten.no_such_operator, overload)
        assert found == f"removed:aten.no_such_operator.{overload}"
        assert len({torch.ops.aten.no_such_operator, torch.ops.aten.no_other_operator}) == 2  # keys of a table
    assert refuses(torch.ops.aten, "no_such_operator")


@pytest.mark.parametrize("overload", ["names_dim", "no_such_overload"])
def test_removed_overload_is_a_placeholder_during_torchax_import(overload: str):
    with named():
        assert getattr(torch.ops.aten.std, overload) == f"removed:aten.std.{overload}"
        assert isinstance(torch.ops.aten.std.dim, torch._ops.OpOverload)
    assert refuses(torch.ops.aten.std, overload)


def test_placeholders_exist_only_for_aten_in_this_thread():
    with named():
        assert refuses(torch.ops.aten, "__no_such__") and refuses(torch.ops.aten.std, "__no_such__")
        assert refuses(torch.ops.aten.no_such_operator, "__call__")
        assert refuses(torch.ops.prims, "no_such_operator")
        found: list[bool] = []
        other = threading.Thread(target=lambda: found.append(refuses(torch.ops.aten, "no_such_operator")))
        other.start()
        other.join()
    assert found == [True]


def test_placeholders_are_removed_after_an_error():
    with pytest.raises(ZeroDivisionError), named():
        raise ZeroDivisionError
    assert refuses(torch.ops.aten, "no_such_operator")


# Removes from this torch what 2.14 removed, and operators of other tables of torchax, as a later release might.
WITHOUT = """
    import jax.numpy as jnp
    import torch

    REMOVED = ("cholesky", "qr", "trace", "fft_hfft2", "mkldnn_rnn_layer")
    namespace = torch._ops._OpNamespace
    get_packet = namespace.__getattr__

    def packet(self, key):
        if self is torch.ops.aten and key in REMOVED:
            raise AttributeError(key)
        return get_packet(self, key)

    namespace.__getattr__ = packet
    for name in REMOVED:
        torch.ops.aten.__dict__.pop(name, None)
    from comfyui_tpu.tpu_runtime.programs import torch_bridge

    weight = jnp.arange(6.0).reshape(2, 3)
    print(torch_bridge.call(torch.nn.functional.linear, jnp.ones(3), weight).tolist())
    assert not hasattr(torch.ops.aten, "cholesky")
"""


def test_torchax_import_with_removed_operators_succeeds():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", dedent(WITHOUT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[-2] == "[3.0, 12.0]"
