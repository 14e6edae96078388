"""Names in `train.reward_funcs`, and the files of the user's whose code they run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from modulefinder import ModuleFinder
from pathlib import Path

from finetune.config.paths import user_path
from finetune.config.sections import BUILTIN
from finetune.config.train_keys import TrainSection


def reward_names(train: TrainSection) -> Sequence[str]:
    """The names in `train.reward_funcs`: a list, or as typed, `a` or `a,b`."""
    given = train.reward_funcs or ()
    return [name.strip() for name in given.split(",")] if isinstance(given, str) else given


def code_of(names: Sequence[str]) -> list[Path]:
    """Files of the user's whose code these rewards run, found without running any.

    A file or module by name, and what it imports from beside it, from this folder or PYTHONPATH;
    libraries that are installed are none of these.
    """
    found = list[Path]()
    for name in names:
        file, module = user_path(name.partition(":")[0]), name.rpartition(".")[0]
        beside = [str(file.parent)] if file.suffix == ".py" else []
        here = [*beside, os.getcwd(), *os.getenv("PYTHONPATH", "").split(os.pathsep)]
        # Python's finder takes `datasets/`, a folder of rows beside an import of it, for a module.
        folders = [one for root in here for one in Path(root).glob("*") if one.is_dir()]
        plain = [one.name for one in folders if not (one / "__init__.py").exists()]
        # Modules are found by their bytecode: a reward may do anything when it is imported.
        finder = ModuleFinder(here, excludes=["finetune", *plain])
        # What is wrong with it is said when it runs.
        with contextlib.suppress(OSError, ImportError, SyntaxError, ValueError):
            if beside:
                finder.run_script(str(file))
            elif module and not name.startswith(BUILTIN):
                finder.import_hook(module)
        files = (getattr(one, "__file__", None) for one in finder.modules.values())
        found += [Path(file) for file in files if file]
    return sorted({file.absolute() for file in found})
