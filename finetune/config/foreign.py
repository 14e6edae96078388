"""A configuration of Axolotl or LLaMA-Factory as a recipe: `cp --from`.

    base_model: NousResearch/...           ->  model.name
    datasets: [{path: mine.jsonl, ...}]    ->  data.path, data.columns
    fsdp_config: ...                       ->  a line: why there is no such key here

Each key is looked up in `other_names.toml`: as a key of such a file, then among the names that
errors know, then among the arguments of the method's configuration, which all three pass on. What
is left over, and what a recipe refuses, is listed with its reason; nothing is dropped in silence.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.config.aliases import DROPPED, FOREIGN, SETTINGS, in_recipe, is_off
from finetune.config.methods import arguments, method_of
from finetune.config.recipe import checked
from finetune.config.yaml import PlainText, dump_yaml, parse_yaml, plain_data, read_text, shown
from finetune.errors import ConfigError

FILES, COLUMNS = FOREIGN["files"], FOREIGN["columns"]
SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt")
LISTS = ("target_modules", "modules_to_save", "layers_to_transform")
"""Keys of `lora` whose names another tool has in one text, with commas."""
METHOD = ("rl", "stage", "pref_loss")
"""Keys that decide the method, and by it which others there are."""


class Translation:
    """A file of another tool as sections of a recipe.

    Attributes:
        tool: name of the tool.
        recipe: section -> key -> value.
        taken: `section.key` -> a line, `key: value -> section.key=value`.
        same: keys whose value is how it is here anyway.
        left: key of the file -> why there is no such key here.
    """

    def __init__(self, source: Path) -> None:
        """Translate the file, and check the recipe.

        Raises:
            ConfigError: the file is of neither tool, or names no rows.
        """
        read: Any = parse_yaml(read_text(source), shown(source))[0]
        self.given = {k: v for k, v in read.items() if v} if isinstance(read, dict) else {}
        self.tool = "Axolotl" if "base_model" in self.given else "LLaMA-Factory"
        if not {"base_model", "model_name_or_path"} & {*self.given}:
            raise ConfigError(
                "this is no configuration of Axolotl or LLaMA-Factory",
                where=shown(source),
                why="the one has base_model, the other model_name_or_path",
                fix="python -m finetune cp RECIPE copies one of ours",
            )
        self.recipe = defaultdict[str, dict[str, Any]](dict, model={}, precision={}, data={})
        self.taken, self.left, self.same = dict[str, str](), dict[str, str](), list[str]()
        try:
            for key in sorted(self.given, key=lambda key: key not in METHOD):
                self._take(key, self.given[key])
            (self._axolotl if self.tool == "Axolotl" else self._llama_factory)(source.parent)
            self._settle()
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            if isinstance(error, ConfigError):
                raise
            what = f"a value is of another kind than {self.tool} has it: {error}"
            fix = "python -m finetune cp RECIPE copies one of ours"
            raise ConfigError(what, where=shown(source), fix=fix) from error
        self._check()

    def put(self, origin: str, setting: str, value: Any = None) -> None:
        """Set `section.key`, or `section.key=fixed`, which replaces nothing."""
        name, _, fixed = setting.partition("=")
        section, _, key = name.partition(".")
        if fixed not in ("", "{}"):
            value = self.recipe[section].get(key, PlainText(fixed))
        elif key in LISTS and "," in value:
            value = value.split(",")
        self.recipe[section][key] = value
        before = self.taken.get(name, "").partition(" -> ")[0]
        origin = ", ".join(filter(None, (before, origin)))
        self.taken[name] = f"{origin} -> {name}={_short(value)}"

    def _take(self, key: str, value: Any) -> None:
        """Take a key over by the tables; of special tokens each."""
        if isinstance(value, dict) and any(name.startswith(f"{key}.") for name in FILES):
            for part, one in value.items():
                self._take(f"{key}.{part}", one)
            return
        names = (f"{key}={str(value).lower()}", key, key.partition(".")[0])
        rule, setting = next((FILES[n] for n in names if n in FILES), None), SETTINGS.get(key, "")
        if rule is None and key in arguments(method_of(self.recipe["train"])):
            rule = f"train.{key}"
        if rule is None and setting and " " not in setting:
            rule = "" if "=" in setting and is_off(value) else setting
        if rule is None or key in DROPPED:
            rule = "-" + (in_recipe(key, value) or "nothing here says it")
        origin = f"{key}: {_short(value)}"
        if rule.startswith("-"):
            self.left[origin] = rule[1:]
        elif not rule:
            self.same.append(origin)
        elif rule != "rows":
            for one in rule.split():
                self.put(origin, one, value)

    def _axolotl(self, folder: Path) -> None:
        """Data sets, and intervals by the epoch."""
        for key in ("datasets", "pretraining_dataset", "test_datasets"):
            listed = self.given.get(key, [])
            for entry in listed if isinstance(listed, list) else [listed]:
                self._rows(key, entry if isinstance(entry, dict) else {"path": entry}, folder)
        for kind in ("eval", "save"):
            key, train = f"{kind}s_per_epoch", self.recipe["train"]
            if (count := float(self.given.get(key, 1))) > 1:
                # Transformers takes an interval below 1 as a share of all steps.
                every = 1 / (count * float(self.given.get("num_epochs", 1)))
                self.put(f"{key}: {count:g}", f"train.{kind}_steps", PlainText(f"{every:.4g}"))
            by = "steps" if f"{kind}_steps" in train else "epoch"
            train.setdefault(f"{kind}_strategy", PlainText(by))

    def _llama_factory(self, folder: Path) -> None:
        """Data sets by the registry, `dataset_info.json`."""
        folder_of_sets = str(self.given.get("dataset_dir", "data"))
        files = [base / folder_of_sets / "dataset_info.json" for base in (Path(), folder)]
        file = next((file for file in files if file.is_file()), files[0])
        known = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        for key in ("dataset", "eval_dataset"):
            listed = self.given.get(key, [])
            for name in listed.split(",") if isinstance(listed, str) else listed:
                if (entry := known.get(name.strip())) is None:
                    why = f"{shown(file)} does not have it: write data.path=FILE for this name"
                    self.left[f"{key}: {name.strip()}"] = why
                self._rows(key, entry or {"file_name": f"{name.strip()}.json"}, file.parent)

    def _rows(self, key: str, entry: Mapping[str, Any], folder: Path) -> None:
        """Take one data set over: where its rows lie, and the names of their columns."""
        kind, data = entry.get("type"), self.recipe["data"]
        columns = {**entry, **entry.get("columns", {}), **(kind if isinstance(kind, dict) else {})}
        sources = map(entry.get, ("data_files", "hf_hub_url", "file_name", "path"))
        source = next(filter(None, sources), None)
        name = str(source[0] if isinstance(source, list) else source)
        if not Path(name).exists() and (folder / name).exists():
            name = str(folder / name)
        local = "file_name" in entry or name.endswith(SUFFIXES) or Path(name).exists()
        origin, files = f"{key}: {name}", data.get("path", [])
        if key in ("test_datasets", "eval_dataset"):
            self.put(origin, "data.eval_path", name)
        elif "name" in data or (files and not local):
            self.left[origin] = "one data set of the hub is read, or several files (data.path)"
        elif files:
            self.put(origin, "data.path", [*(files if isinstance(files, list) else [files]), name])
        else:
            self.put(origin, "data.path" if local else "data.name", name)
        for word, value in columns.items():
            if (ours := COLUMNS.get(word)) is None:
                self.left[f"{key}.{word}: {_short(value)}"] = "rows are recognized by their columns"
            elif ours in ("subset", "split"):
                if not local:  # of a file all rows are read
                    self.put(f"{key}.{word}: {value}", f"data.{ours}", value)
            elif ours and value not in (ours, "conversations"):
                data.setdefault("columns", {})[ours] = value
                line = f"{key}.{word}: {value} -> data.columns={{{ours}: {value}}}"
                self.taken[f"data.columns.{ours}"] = line

    def _settle(self) -> None:
        """Say what the tool does where the file is silent; evaluate nothing without rows for it."""
        data, train, lora = (self.recipe[name] for name in ("data", "train", "lora"))
        for setting in FOREIGN["defaults"][self.tool].split():
            section, _, key = setting.partition("=")[0].partition(".")
            if key not in self.recipe[section]:
                self.put(f"{self.tool}'s default", setting)
        if self.tool == "LLaMA-Factory":
            # LLaMA-Factory's default is twice the rank.
            lora.setdefault("alpha", PlainText(str(2 * int(lora.get("r", 8)))))
        asked = self.given.get("adapter", self.given.get("finetuning_type"))
        if str(asked or ("lora" if self.tool == "LLaMA-Factory" else "")) not in ("lora", "qlora"):
            self.left |= {"lora_...": "no adapter is asked for: all weights train"} if lora else {}
            del self.recipe["lora"]
        idle, why = ["save_strategy", "save_steps"], "early stopping saves at each evaluation"
        if "eval_path" not in data and is_off(data.setdefault("eval_fraction", PlainText("0"))):
            train |= {"eval_strategy": PlainText("no")}
            idle = ["eval_steps", "load_best_model_at_end", "early_stopping_patience"]
            why = "no rows are set aside to evaluate on (data.eval_fraction=0)"
        elif "early_stopping_patience" not in train:
            return
        for key in {*idle} & {*train}:
            self._leave(f"train.{key}", why)

    def _check(self) -> None:
        """Leave out what a recipe refuses, with the reason."""
        while True:
            try:
                checked(self.recipe, ".".join)
            except ConfigError as error:
                for one in (error, *error.more):
                    section, _, key = one.where.partition(".")
                    if key not in self.recipe[section]:
                        raise
                    self._leave(one.where, one.what)
            else:
                return

    def _leave(self, setting: str, why: str) -> None:
        section, _, key = setting.partition(".")
        del self.recipe[section][key]
        self.left[self.taken.pop(setting, setting).partition(" -> ")[0]] = why

    def lines(self) -> list[str]:
        """What became of each key."""
        return [
            *(f"  {line}" for line in self.taken.values()),
            f"as it is here anyway: {', '.join(self.same) or 'nothing'}",
            *(f"! not taken over: {key}: {why}" for key, why in self.left.items()),
        ]

    def to_yaml(self, source: str) -> str:
        """The recipe's text, with what was left out above it."""
        head = [f"From {source} ({self.tool}), by `python -m finetune cp --from`. Not taken over:"]
        head += [f"  {key}: {why}" for key, why in self.left.items()]
        comments = "".join(f"# {line}\n" for line in head)
        return comments + "\n" + dump_yaml(plain_data({"": dict(self.recipe)})[""])


def _short(value: Any) -> str:
    text = json.dumps(plain_data([value])[0], ensure_ascii=False, default=str).strip('"')
    return text if len(text) < 60 else text[:57] + "..."
