"""`--push`: nothing is uploaded without `--yes`, and the hub's refusals have a fix."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

from tests.run_folders import make_run


@pytest.fixture
def hub(monkeypatch):
    """A stand-in of the hub: what it was asked, in order; `refuse` is what it raises."""

    class Hub:
        refuse: Exception | None = None
        asked: list = []

        def __init__(self, **_):
            pass

        def whoami(self):
            if Hub.refuse:
                raise Hub.refuse

        def create_repo(self, name, *, private, exist_ok):
            Hub.asked.append(("create", name, private, exist_ok))

        def upload_folder(self, *, repo_id, folder_path, commit_message, ignore_patterns):
            names = {f.name for f in folder_path.iterdir()} - {*ignore_patterns}
            Hub.asked.append(("folder", repo_id, names))
            return type("Commit", (), {"commit_url": f"https://hub/{repo_id}/commit/1"})

        def upload_file(self, *, repo_id, path_or_fileobj, path_in_repo, commit_message):
            Hub.asked.append(("file", repo_id, path_in_repo))
            return type("Commit", (), {"commit_url": f"https://hub/{repo_id}/commit/2"})

    Hub.asked = []
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return Hub


@pytest.fixture
def exported(tmp_path):
    """A run, and a finished export of it."""
    run, out = make_run(tmp_path / "run"), tmp_path / "out"
    out.mkdir()
    record = {"finished": True, "target": "merged", "run": str(run.resolve())}
    (out / "export.json").write_text(json.dumps(record))
    (out / "README.md").write_text("# A card\n")
    (out / "model.safetensors").write_bytes(b"0" * 3 * 2**20)
    return run, out


def test_a_finished_export_is_shown_and_with_yes_uploaded(hub, exported, cli, tmp_path):
    run, out = exported
    command = ("export", run, "--to", "merged", out, "--push", "me/harbour")
    said = cli(*command)
    assert said.code == 0
    for part in ("https://huggingface.co/me/harbour", "3.0 MiB  model.safetensors", "# A card"):
        assert part in said.out
    assert said.out.splitlines()[-1] == "nothing was uploaded: --yes uploads it"
    assert "export.json" not in said.out
    assert hub.asked == []
    said = cli(*command, "--yes")
    assert said.out.splitlines()[-1] == "uploaded: https://hub/me/harbour/commit/1"
    names = {"README.md", "model.safetensors"}
    assert hub.asked == [("create", "me/harbour", True, True), ("folder", "me/harbour", names)]
    other = cli("export", run, "--to", "adapter", out, "--push", "me/harbour")
    assert other.code == 2, "an export to something else is not pushed for it"


@pytest.mark.parametrize("yes", [(), ("--yes",)])
def test_a_folder_of_this_machine_is_not_uploaded(yes, hub, exported, cli):
    """PEFT's configuration names the base: by its folder, where it is not on the hub."""
    run, out = exported
    record = json.loads((out / "export.json").read_text()) | {"weights": "/home/me/base"}
    (out / "export.json").write_text(json.dumps(record))
    command = ("export", run, "--to", "merged", out, "--push", "me/harbour", *yes)
    named = out / "adapter_config.json"
    named.write_text(json.dumps({"base_model_name_or_path": "/home/me/base"}))
    said = cli(*command)
    assert (said.code, hub.asked) == (2, [])
    assert "adapter_config.json names a folder of this machine" in said.err
    named.write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    assert cli(*command).code == 0


@pytest.mark.slow
def test_a_report_is_pushed_as_its_page(hub, exported, cli, tmp_path):
    said = cli("report", exported[0], "--to", tmp_path / "page", "--push", "me/harbour", "--yes")
    assert said.code == 0, said.err
    assert hub.asked[-1] == ("file", "me/harbour", "report.html")


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (LocalTokenNotFoundError("Token is required, but no token found."), "hf auth login"),
        (OfflineModeIsEnabled("offline mode is enabled"), "unset HF_HUB_OFFLINE"),
        (ConnectionError("Name or service not known"), "the same command tries again"),
    ],
)
def test_what_the_hub_refuses_has_a_fix(error, fix, hub, exported, cli):
    run, out = exported
    hub.refuse = error
    said = cli("export", run, "--to", "merged", out, "--push", "me/harbour", "--yes")
    assert (said.code, hub.asked) == (2, [])
    assert str(error) in said.err
    assert fix in said.err


def test_a_name_that_the_hub_does_not_take(exported, cli):
    for name in ("harbour", "me/har bour", "me/a/b", "https://huggingface.co/me/harbour"):
        said = cli("export", exported[0], "--to", "merged", exported[1], "--push", name)
        assert said.code == 2
        assert "--push me/my-model" in said.err
