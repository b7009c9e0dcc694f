"""What may be in an installation's way: each function makes one and returns the words of the command."""

import shutil


def no_network(world, patch):
    return ["--comfyui", str(world / "new" / "ComfyUI"), "--comfyui-origin", str(world / "gone")]


def no_space(world, patch):
    usage = shutil.disk_usage("/")
    patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2_000_000_000))
    return ["--comfyui", str(world / "new" / "ComfyUI")]


def too_old(world, patch):
    return ["--comfyui", str(make_comfyui(world, '__version__ = "0.3.75"\n'))]


def says_no_version(world, patch):
    return ["--comfyui", str(make_comfyui(world, ""))]


def no_comfyui(world, patch):
    (world / "bad" / "pictures").mkdir(parents=True)
    return ["--comfyui", str(world / "bad")]


def another_copy(world, patch):
    folder = make_comfyui(world, '__version__ = "0.33.0"\n')
    (folder / "custom_nodes" / "tpu").mkdir(parents=True)
    (folder / "custom_nodes" / "tpu" / "pyproject.toml").write_text('[project]\nname = "comfyui-tpu"\n')
    return ["--comfyui", str(folder)]


def another_link(world, patch):
    folder = make_comfyui(world, '__version__ = "0.33.0"\n')
    (folder / "custom_nodes").mkdir()
    (folder / "custom_nodes" / "ComfyUI-TPU").symlink_to(world)
    return ["--comfyui", str(folder)]


def no_git(world, patch):
    patch.setenv("PATH", str(world))
    return []


def make_comfyui(world, version):
    folder = world / "bad"
    folder.mkdir()
    for name, text in {"main.py": "", "requirements.txt": "torch\n", "comfyui_version.py": version}.items():
        (folder / name).write_text(text)
    return folder
