"""What the package uses of libraries and nobody promises is listed, and is in what is installed."""

from __future__ import annotations

import pytest

from tests.canary import gone, import_package, missing, unlisted, unused

NOTHING = {
    kind: {} for kind in ("names", "attributes", "arguments", "classes", "signatures", "overrides")
}


def test_private_names_of_libraries_are_listed() -> None:
    assert unlisted() == []


def test_a_listed_private_name_is_used(tmp_path) -> None:
    assert unused() == []
    (tmp_path / "module.py").write_text("x = y._ours", encoding="utf-8")
    assert unused(tmp_path, {"names": {"y": ["y._ours", "y._others"]}}) == ["y._others"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of libraries, when they are first imported
def test_all_that_no_library_promises_is_where_it_is_listed() -> None:
    import_package()
    assert [*gone()] == []


@pytest.mark.parametrize(
    ("kind", "listed", "said"),
    [
        ("names", {"torch": ["torch._no_such"]}, "torch._no_such is gone"),
        ("attributes", {"textwrap": ["widest"]}, "textwrap has no widest among its attributes"),
        ("arguments", {"textwrap": ["breadth"]}, "textwrap has no breadth among its arguments"),
        ("classes", {"textwrap": ["wrap"]}, "textwrap has no wrap among its classes"),
        ("signatures", {"textwrap.fill": ["width", "text"]}, "textwrap.fill takes text, width"),
        ("overrides", {"torch.nn.Module": ["no_such"]}, "torch.nn.Module.no_such is gone"),
    ],
)
def test_a_name_that_is_gone_is_found(kind, listed, said) -> None:
    (line,) = gone(NOTHING | {kind: listed})
    assert line.startswith(said)


def test_a_method_that_takes_other_arguments_than_ours_is_found(monkeypatch) -> None:
    class Base:
        def forward(self, ids, cache=None): ...

    class Ours(Base):
        def forward(self, ids, past_key_values=None): ...

    Ours.__module__ = "finetune.made_up"
    monkeypatch.setattr("textwrap.Base", Base, raising=False)
    (line,) = gone(NOTHING | {"overrides": {"textwrap.Base": ["forward"]}})
    assert line == "textwrap.Base.forward takes no past_key_values: finetune.made_up.Ours"


@pytest.mark.parametrize(
    ("use", "found"),
    [
        ("from trl.models import _private", ["_private"]),
        ("import torch._private as p", ["_private"]),
        ("x = y._private, y.public", ["_private"]),
        ("x = vars(y).get('_private')", ["_private"]),
        ("patches.replace(Trainer, '_private', save)", ["_private"]),
        ("names = {f'{n}_private' for n in known}", []),
        ("class A:\n def _private(self): return self._private", []),
    ],
)
def test_a_private_name_is_found(use, found, tmp_path) -> None:
    (tmp_path / "module.py").write_text(use, encoding="utf-8")
    assert [line.partition(":")[0] for line in unlisted(tmp_path, {})] == found


def test_a_name_in_a_module_written_in_c_is_looked_up_too() -> None:
    assert not missing("torch._C._current_graph_task_id")
    assert missing("torch._C._no_such_name")
    assert missing("torch._no_such_module.name")
