"""On PYTHONPATH while PufferLib's source package is built: keeps its setup.py from downloading, and from building more.

That setup.py fetches libraries for the browser and for one game from a code host, unpinned, even where they are not
used; it skips those whose directory is there. Of the C environments only CartPole is left to be compiled.
"""

from pathlib import Path

UNUSED = ("raylib-5.5_webassembly", "box2d-web", "box2d-linux-amd64")
OCEAN = Path("pufferlib/ocean")

if Path("setup.py").is_file() and OCEAN.is_dir():
    for name in UNUSED:
        Path(name).mkdir(exist_ok=True)
    for binding in OCEAN.glob("**/binding.c"):
        if binding.parent.name != "cartpole":
            binding.unlink()
