"""Helper for scripts: FP8 in Accelerate, hence in `Trainer`, `SFTTrainer` and custom loops."""

from __future__ import annotations

import atexit
import inspect
import re
import sys
import warnings
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from finetune.config.aliases import as_arguments, in_python, in_script
from finetune.errors import ConfigError, UnknownArgumentError, did_you_mean, speaking
from finetune.hardware.device import EXPANDABLE, expand_segments, processes, refuse_lone_process
from finetune.precision.facts import ENGINES, UNDECIDED, EngineName, Fp8Format, Scaling
from finetune.precision.settings import PrecisionConfig
from finetune.runs.receipt import Receipt
from finetune.section import RefusedError
from finetune.training.helper import session

if TYPE_CHECKING:
    from accelerate import Accelerator


def setup_fp8_mixed_precision_training(
    backend: Literal["auto", "te", "torchao", "emulated"] = "auto",
    *,
    scaling: Scaling | None = None,
    fp8_format: Fp8Format | None = None,
    margin: int = 0,
    amax_history_len: int = 1024,
    amax_compute_algo: Literal["max", "most_recent"] = "max",
    reduce_amax: bool = True,
    keep: Iterable[str] = (),
    eval_precision: Literal["high", "fp8"] = "high",
    compile: Literal["auto", "on", "off"] = "auto",
    emulation: Literal["forbid", "allow", "exact"] = "forbid",
    on_unsupported: Literal["error", "bf16"] = "error",
    health_every: int = 50,
    **more: Any,
) -> Accelerator:
    """Make every `Trainer`, `SFTTrainer` or `Accelerator` built after this call train in FP8.

    This is about *compute*: linear layers multiply in FP8, from weights stored in 16 or 32 bits.
    For weights *stored* in FP8 see `load_in_fp8`. A quantized model is rejected. The
    exception is a base stored in FP8 under adapters, with `frozen="fp8"`: its codes are multiplied
    as they are. That setting also stores the frozen base of a plain model in FP8.

        setup_fp8_mixed_precision_training(backend="te")
        trainer = SFTTrainer(model=model, args=SFTConfig(...), train_dataset=dataset)
        trainer.train()

    Custom loops use the returned accelerator:

        accelerator = setup_fp8_mixed_precision_training(backend="torchao")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    Models are loaded by the script. With packed rows, `attn_implementation="varlen"` in
    `from_pretrained`, after this call, keeps documents apart without a mask.

    The first steps are a proof (see `finetune.precision.proof.proof`); `finetune.get_receipt()`
    says what ran. A second call replaces the first, `teardown_fp8_mixed_precision_training()`
    undoes it.

    Args:
        backend: FP8 backend; `auto` takes the fastest that has the scaling where the GPU has FP8:
            torchao, else Transformer Engine.
        scaling: `delayed`, `tensorwise`, `rowwise`, `rowwise_with_gw_hp`, `blockwise`, `mxfp8` or
            `nvfp4`. Left out: `delayed` with backend `te` (whose settings the amax arguments are),
            else `tensorwise`.
        fp8_format: `hybrid`, `e4m3` or `e5m2`; left out: as usual for the scaling.
        margin, amax_history_len, amax_compute_algo, reduce_amax: delayed scaling only.
        keep: patterns of layers that stay in high precision.
        eval_precision: `high`, or `fp8` to evaluate and generate in FP8 too.
        compile: `torch.compile` of each decoder layer; `auto` with torchao on a GPU, in a run that
            is long enough for it to save time.
        emulation: `allow` emulates FP8 where the device has none, `exact` in float32 products.
        on_unsupported: where FP8 is not available, stop or train in BF16 with a loud warning.
        health_every: optimizer steps between logs of training health, of `Trainer`s (a loop
            written by hand has no log); 0 for none. See `finetune.HealthMonitor`.
        **more: any other setting of a recipe's `precision` section by its name (`frozen`, `map`,
            `first_n`, `high_gemms`, ...); the rest goes to `accelerate.Accelerator`.

    Returns:
        An `accelerate.Accelerator` that trains in FP8.

    Raises:
        ConfigError: a value that does not exist or does not go with the scaling; or `accelerate
            launch` was to start several processes, and started one.
        UnknownArgumentError: a setting that does not exist.
        PrecisionError: FP8 is not available on this device, and why.
        MissingExtraError: the backend's library is not installed.
    """
    from accelerate import Accelerator
    from pydantic import ValidationError

    refuse_lone_process("SCRIPT")
    name = str(backend).lower()
    named = inspect.signature(setup_fp8_mixed_precision_training).parameters
    others = PrecisionConfig.model_fields.keys() - named.keys() - {"compute", "format", "eval"}
    # Settings of a recipe's `precision` that are rare in scripts: taken, and not in the signature.
    settings = {key: more.pop(key) for key in others & more.keys()}
    # Checked here: Accelerate would raise a TypeError without a word about ours.
    unknown = more.keys() - inspect.signature(Accelerator).parameters.keys()
    if unknown:
        word = sorted(unknown)[0]
        replacement = in_script(word, more[word])
        raise UnknownArgumentError(
            f"there is no setting {word!r}"
            + did_you_mean(word, () if replacement else [*named, *others]),
            where="setup_fp8_mixed_precision_training(...)",
            why="neither this function nor accelerate.Accelerator knows it",
            fix=replacement
            or f"leave {word} out; help(finetune.setup_fp8_mixed_precision_training) lists all",
        )
    settings |= {
        "compute": "fp8",
        "backend": name,
        "scaling": scaling or ENGINES.get(cast("EngineName", name), UNDECIDED).scaling,
        "format": fp8_format.lower() if isinstance(fp8_format, str) else fp8_format,
        "margin": margin,
        "amax_history_len": amax_history_len,
        "amax_compute_algo": amax_compute_algo,
        "reduce_amax": reduce_amax,
        "keep": (keep,) if isinstance(keep, str) else tuple(keep),
        "eval": eval_precision,
        "compile": compile,
        "emulation": emulation,
        "on_unsupported": on_unsupported,
        "health_every": health_every,
    }
    try:
        precision = PrecisionConfig.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        refusal = first.get("ctx", {}).get("error")
        raise ConfigError(
            refusal.what if isinstance(refusal, RefusedError) else f"{key}: {first['msg']}",
            where="setup_fp8_mixed_precision_training(...)",
            fix=as_arguments(
                refusal.ways if isinstance(refusal, RefusedError) else _values(key, first)
            ),
        ) from None
    # Errors name arguments of Python, not overrides of the command line.
    with speaking(in_python):
        running = _begin(precision)
    if running.resolution.fallback:
        warnings.warn(running.resolution.fallback, stacklevel=2)
    # Called twice in a notebook, it would say so twice.
    atexit.unregister(_say_if_unused)
    atexit.register(_say_if_unused)
    if running.device.kind == "cpu" and processes() > 1:
        more.setdefault("cpu", True)  # Accelerate joins processes without a GPU only with this
    try:
        return Accelerator(**more)
    # Or Accelerators that the script builds afterwards would follow a set-up that failed.
    except BaseException:
        session.uninstall()
        raise


def _begin(precision: PrecisionConfig) -> session.Session:
    """Put the session of a script into effect: now, and after a run of a recipe inside it."""
    from finetune.training.health.monitor import watch_trainers
    from finetune.training.helper import varlen

    running = session.install(precision)
    # A recipe that is run inside a script replaces its session, and gives it back.
    running.again = partial(_begin, precision)
    running.undo.enter_context(speaking(in_python))
    if EXPANDABLE in (told := expand_segments().reason):
        warnings.warn(f"more of the GPU's memory stands idle in fragments: {told}", stacklevel=3)
    varlen.register()
    watch_trainers(running)
    return running


def _say_if_unused() -> None:
    """Say at the end of a script that nothing ran in FP8."""
    running = session.in_force()
    if running is not None and not running.has_prepared:
        print("! FP8 was set up, and no model was prepared: nothing ran in FP8", file=sys.stderr)


def _values(key: str, problem: Any) -> list[str]:
    """Settings that solve a pydantic error: the values that exist, or the default."""
    if problem["type"] != "literal_error":
        return [f"~{key.partition('.')[0]}"]
    return [f"{key}={value}" for value in re.findall(r"'([^']+)'", problem["ctx"]["expected"])]


def teardown_fp8_mixed_precision_training() -> None:
    """Undo the helper: remove patches, restore plain models. Harmless when not set up."""
    session.uninstall()


def get_receipt() -> Receipt:
    """Receipt of the current session.

    Raises:
        OrderError: there is no session.
    """
    return session.current().receipt()
