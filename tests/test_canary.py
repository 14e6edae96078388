"""What the package uses of libraries and nobody promises is listed, and is in what is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.canary import Canary, Sources, Uses, look, missing

LIBRARY = '''
class Base:
    layer_scale = 1.0

    def forward(self, ids, past_key_values=None):
        """Not here: dropout, Adapter."""

    def _prepare(self, inputs, mode):
        return self.forward(inputs, past_key_values=mode)  # layer_scale

def attend(query, key, *, dropout=0.0): ...

class Adapter: ...
'''
PACKAGE = """
from transformers import Base, attend

def hook(module, args, kwargs):
    return [kwargs.get(name) for name in ("past_key_values",)]

class Ours(Base):
    def forward(self, ids, past_key_values=None): ...
    def _prepare(self, inputs, mode): ...

def use(x):
    attend(x, x, dropout=1.0)
    return type(x).__name__ == "Adapter" and getattr(x, "layer_scale", None)
"""
LISTS = {
    "names": {"transformers": []},
    "attributes": {"transformers": ["layer_scale"]},
    "arguments": {"transformers": ["past_key_values"]},
    "classes": {"transformers": ["Adapter"]},
    "methods": {},
    "signatures": {"transformers.attend": ["query", "key"]},
    "overrides": {"transformers.Base": ["forward", "_prepare"]},
    "elsewhere": {},
}
RENAMED = """@deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(self, ids, cache"""


def planted(folder: Path, library: str, package: str = PACKAGE, lists: dict = LISTS) -> Canary:
    """The canary over a made-up package and library."""
    for name, text in (("lib/transformers", library), ("finetune", package)):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text, encoding="utf-8")
    return look(folder / "finetune", Sources([folder / "lib"]), lists)


def test_all_that_no_library_promises_is_listed_and_installed() -> None:
    canary = look()
    assert canary.unlisted == []
    assert canary.gone == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param("", "", [], id="nothing"),
        pytest.param(
            "def forward(self, ids, past_key_values",
            RENAMED,
            [
                "transformers.Base.forward takes no past_key_values: finetune/__init__.py:8",
                "transformers has no past_key_values among arguments: finetune/__init__.py:5",
            ],
            id="argument",
        ),
        pytest.param(
            "dropout=0.0",
            "drop=0.0",
            ["transformers.attend takes no dropout: finetune/__init__.py:12"],
            id="keyword",
        ),
        pytest.param(
            "(query, key,",
            "(query, bias, key,",
            ["transformers.attend takes query, bias, key: finetune/__init__.py:12"],
            id="position",
        ),
        pytest.param(
            "class Adapter",
            "class LoraAdapter",
            ["transformers has no Adapter among classes: finetune/__init__.py:13"],
            id="class",
        ),
        pytest.param(
            "layer_scale = 1.0",
            "scale = 1.0",
            ["transformers has no layer_scale among attributes: finetune/__init__.py:13"],
            id="attribute",
        ),
        pytest.param(
            "def _prepare(",
            "def _prepare_all(",
            ["transformers.Base has no _prepare: finetune/__init__.py:9"],
            id="override",
        ),
        pytest.param(
            "def attend(",
            "def attention(",
            [
                "transformers.attend takes nothing: finetune/__init__.py:12",
                "transformers.attend is gone: finetune/__init__.py:2",
            ],
            id="import",
        ),
    ],
)
def test_a_planted_change_is_found(old, new, said, tmp_path) -> None:
    library = LIBRARY.replace(old, new).replace("past_key_values=mode", "**mode")
    found = planted(tmp_path, library)
    assert [line.partition(": ")[2] for line in found.gone] == said
    assert found.unlisted == []


@pytest.mark.parametrize(
    ("use", "kind", "names"),
    [
        ("def f(**kwargs): return kwargs['cache']", "arguments", {"cache"}),
        ("def f(a, b, kwargs): return 'cache' in kwargs", "arguments", {"cache"}),
        ("def f(s):\n a = s.bind(1).arguments\n return a.pop('cache')", "arguments", {"cache"}),
        ("def f(**kwargs): g(kwargs)\ndef g(x): x.get('cache')", "arguments", {"cache"}),
        ("import trl\nclass A(trl.B):\n keys = ['cache']", "arguments", {"cache"}),
        ("def f(query, **others): ...", "arguments", {"query"}),
        ("KNOWN = ('A', 'B')\nfound = type(x).__name__ in KNOWN", "classes", {"A", "B"}),
        ("names = {type(x).__name__ for x in y}\nfound = 'A' in names", "classes", {"A"}),
        ("found = 'Norm' in type(x).__name__", "classes", set()),
        (
            "NAMES = {'a': 1, 'b': 2}\nhas = [hasattr(x, n) for n in NAMES]",
            "attributes",
            {"a", "b"},
        ),
        ("x = vars(y).get('forward'), y._private, y.public", "attributes", {"forward", "_private"}),
        ("patches.replace(Trainer, '_save', save)", "attributes", {"_save"}),
        ("names = {f'{n}_stderr' for n in known}", "attributes", set()),
        ("from trl.models import _private", "names", {"trl.models._private"}),
        ("import trl\ntrl.train(1, 2)", "signatures", {"trl.train"}),
    ],
)
def test_a_use_is_found(use, kind, names, tmp_path) -> None:
    (tmp_path / "module.py").write_text(use, encoding="utf-8")
    assert {*Uses(tmp_path, LISTS | {"names": {"trl": []}}).found[kind]} == names


def test_a_use_that_is_not_listed_is_named(tmp_path) -> None:
    found = planted(tmp_path, LIBRARY, PACKAGE + "    hasattr(x, 'new')\n")
    assert found.unlisted == ["attributes: new: finetune/__init__.py:14"]


def test_a_name_that_is_gone_is_found() -> None:
    assert missing("torch._C._no_such_name")
    assert missing("torch._no_such_module.name")
