"""GPUs by name, and the machine of a run: this one, a named GPU, or one known by its memory only.

The table, `assets/gpus.yaml`, holds memory, dense peak by precision, bandwidth and links. These are
vendors' figures for dense matrices (datasheets like to print twice as much, "with sparsity") with
accumulation in float32, which training uses; GeForce cards do half as much then as with
accumulation in FP16. A GPU that is not listed has no known peak, and none is guessed.

The *driver's* name of this machine's GPU is matched whole: `RTX 4090 D` and `RTX 4090 Laptop GPU`
are other chips than `RTX 4090`. A name that a *user types* is matched without regard to case,
spaces, dashes and the maker's names, but whole too: `H100` is the SXM module and `RTX PRO 6000` the
Workstation Edition, which are sold under the bare name; `A100` alone is an error, for there is one
of 40 and one of 80 GB.

A user's own lines stand in a file of the same form: the one that the environment variable
`FINETUNE_GPUS` names, else `~/.config/fp8-finetune/gpus.yaml`. A line whose `name` is also in the
table replaces the table's, for instance to give it a price.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from finetune.config.paths import ASSETS, user_path
from finetune.config.yaml import parse_yaml, read_text, shown
from finetune.errors import ConfigError, did_you_mean, nearest
from finetune.hardware.device import Device, cores, this_device
from finetune.units import GIB

TABLE = ASSETS / "gpus.yaml"
OWN_VARIABLE = "FINETUNE_GPUS"
OWN_FILE = "~/.config/fp8-finetune/gpus.yaml"
Peak = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp4"]


class Gpu(BaseModel):
    """One line of the table.

    Attributes:
        name: name that a user types; `aliases` are others.
        names: patterns of the driver's name; none for a GPU that is only asked for by name.
        capability: compute capability as torch reports it.
        memory_gib: memory of one GPU as torch reports it, GiB.
        tflops: dense peak by precision of the operands, 10^12 operations a second.
        gb_s: memory bandwidth, 10^9 bytes a second.
        sms: streaming multiprocessors (AMD: compute units).
        l2_mib: level 2 cache, MiB.
        link: usual connection of the GPUs of one machine.
        link_gb_s: rate at which one GPU sends over it, one direction, 10^9 bytes a second.
        pcie_gb_s: rate of transfers to host memory, one direction, 10^9 bytes a second; that of
            `link` if none is given.
        watts: most power that the board draws, where it is known.
        price_usd_per_hour: rent of one GPU, where the user gave it.
        source: origin of the figures.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    aliases: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    vendor: Literal["nvidia", "amd"] = "nvidia"
    capability: tuple[int, int]
    memory_gib: PositiveFloat
    tflops: dict[Peak, PositiveFloat]
    gb_s: PositiveFloat
    sms: PositiveInt
    l2_mib: PositiveFloat
    link: Literal["nvlink", "pcie", "infinity-fabric"]
    link_gb_s: PositiveFloat
    pcie_gb_s: PositiveFloat | None = None
    watts: PositiveFloat | None = None
    price_usd_per_hour: PositiveFloat | None = None
    source: str

    @model_validator(mode="after")
    def _usable(self) -> Gpu:
        if not all(_key(text) for text in (self.name, *self.aliases)):
            raise ValueError("a name needs a letter or digit besides the maker's")
        if not {"bf16", "fp16"} & self.tflops.keys():
            raise ValueError("tflops needs bf16 or fp16, in which models are trained")
        return self

    @property
    def half_peak(self) -> float:
        """Dense peak FLOP/s in BF16, or in FP16 without BF16 units."""
        return self.tflops.get("bf16", self.tflops.get("fp16", 0.0)) * 1e12

    @property
    def keys(self) -> frozenset[str]:
        """All that one may type for it, in the form in which it is compared."""
        drivers = (pattern.replace("*", "") for pattern in self.names)
        return frozenset(map(_key, (self.name, *self.aliases, *drivers)))


_MAKERS = re.compile(r"nvidia|geforce|tesla|amd|instinct|rtx|[^a-z0-9]")


def _key(text: str) -> str:
    """A name without what does not tell GPUs apart: `NVIDIA GeForce RTX 4090` is `4090`."""
    return _MAKERS.sub("", text.lower())


# ---------------------------------------------------------------------------------------- the table


@functools.cache
def gpu_table() -> tuple[Gpu, ...]:
    """The table of the package, in the order of the file."""
    return _read(TABLE)


def gpus_with_own() -> tuple[Gpu, ...]:
    """The user's own GPUs, of the file named or the usual one, then those not replaced by them.

    Raises:
        ConfigError: the file named is not there, is not of this form, or gives a name that another
            GPU has; with file and line.
    """
    named = os.environ.get(OWN_VARIABLE)
    path = user_path(named or OWN_FILE)
    if not named and not path.is_file():
        return gpu_table()
    if not path.is_file():
        raise ConfigError(
            f"there is no file of GPUs {str(path)!r}",
            where=f"{OWN_VARIABLE} or its default",
            fix=f"unset {OWN_VARIABLE}, or write a line of the form of {shown(TABLE)} there",
        )
    own = _read(path)
    names = {_key(gpu.name) for gpu in own}
    rest = tuple(gpu for gpu in gpu_table() if _key(gpu.name) not in names)
    for number, gpu in enumerate(own):
        for other in (*own[:number], *rest):
            if gpu.keys & other.keys:
                raise ConfigError(
                    f"two GPUs have the same name: {gpu.name!r} and {other.name!r}",
                    where=f"{shown(path)}: {gpu.name}",
                    why=f"one could not tell them apart by {min(gpu.keys & other.keys)!r}",
                    fix=f"another name, alias or pattern; a GPU with the name {other.name!r} "
                    "replaces the table's",
                )
    return (*own, *rest)


def _read(path: Path) -> tuple[Gpu, ...]:
    file = shown(path)
    rows, lines = parse_yaml(read_text(path), file)
    try:
        return TypeAdapter(tuple[Gpu, ...]).validate_python(rows)
    except ValidationError as error:
        # A misspelt field comes before the complaint that the right one is missing.
        problems = error.errors()
        problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    at = tuple(str(part) for part in problem["loc"])
    line = next((lines[at[:n]] for n in range(len(at), -1, -1) if at[:n] in lines), 1)
    what = problem["msg"].removeprefix("Value error, ")
    fix = f"lines of the form of {shown(TABLE)}"
    if problem["type"] == "extra_forbidden":
        what = f"a GPU has no field {at[1]!r}{did_you_mean(at[1], Gpu.model_fields)}"
        fix = f"known: {', '.join(Gpu.model_fields)}"
    elif problem["type"] == "missing":
        what, fix = f"{at[-1]} is missing", f"add {at[-1]}; {shown(TABLE)} says what it is"
    elif not at:
        what = "a file of GPUs is a list of lines, each beginning with `- name:`"
    elif len(at) > 1:
        what = f"{'.'.join(at[1:])}: {what}"
    raise ConfigError(what, where=f"{file}:{line}", fix=fix)


# ------------------------------------------------------------------------------------------- lookup


def find_gpu(device: Device) -> Gpu | None:
    """The line of this device, None for a CPU or a GPU that is not listed.

    Raises:
        ConfigError: the user's own file of GPUs is wrong.
    """
    if device.kind != "cuda":
        return None
    for gpu in gpus_with_own():
        if any(fnmatch.fnmatchcase(device.name, pattern) for pattern in gpu.names):
            return gpu
    return None


def named_gpu(text: str) -> Gpu:
    """The GPU that a user means: `H100`, `rtx4090`, `NVIDIA GeForce RTX 4090`, `A100-80GB`.

    Raises:
        ConfigError: no such GPU, or several; names the nearest and lists all.
    """
    gpus, key = gpus_with_own(), _key(text)
    for gpu in gpus:
        if key in gpu.keys:
            return gpu
    where = f"--gpu {text}"
    # A beginning is answered with the names that have it: a GPU is never guessed.
    several = [gpu.name for gpu in gpus if key and any(k.startswith(key) for k in gpu.keys)]
    if several:
        raise ConfigError(
            f"{text!r} does not say which GPU",
            where=where,
            why="they differ in memory or speed" if len(several) > 1 else "there are others",
            fix=f"one of {', '.join(several)}",
        )
    by_key = {k: gpu.name for gpu in gpus for k in gpu.keys}
    close = nearest(key, by_key)
    hint = f"; did you mean {by_key[close]!r}?" if close else ""
    raise ConfigError(
        f"no GPU {text!r} is known{hint}",
        where=where,
        why="its memory and peaks are not guessed",
        fix=f"known: {', '.join(gpu.name for gpu in gpus)}; another one can be described in "
        f"{OWN_FILE}",
    )


def as_device(gpu: Gpu) -> Device:
    """The device that such a GPU would be, to decide for a machine that is not here."""
    name = gpu.names[0].replace("*", "") if gpu.names else gpu.name
    return Device("cuda", name, gpu.capability, gpu.memory_gib, is_rocm=gpu.vendor == "amd")


# ----------------------------------------------------------------------------------------- machine

UNNAMED = (9, 0)
"""Compute capability assumed for a GPU known by its memory only."""


class HostCpu(NamedTuple):
    """The CPU beside a GPU: cores, and 10^9 bytes a second that they reach in its memory.

    By default a desktop's: sixteen cores, two channels of DDR5-5600.
    """

    cores: int = 16
    gb_s: float = 70.0


DESKTOP = HostCpu()


@dataclass(frozen=True)
class Machine:
    """Machine that a run would train on: one of its GPUs, and how many.

    Attributes:
        device: one of the devices.
        gpu: entry of the GPU table; None if its speed is unknown.
        count: number of devices that train together.
        here: True for this machine.
        host: the machine's CPU.
    """

    device: Device
    gpu: Gpu | None
    count: int = 1
    here: bool = False
    host: HostCpu = DESKTOP

    @property
    def memory_bytes(self) -> int:
        """Memory of one device; on a CPU, of which all processes have one, an equal share."""
        return int(self.device.memory_gib * GIB / (self.count if self.device.kind == "cpu" else 1))

    def __str__(self) -> str:
        name = self.gpu.name if self.gpu else self.device.name
        return f"{f'{self.count} x ' if self.count > 1 else ''}{name}"


def this_machine(device: Device, processes: int = 1) -> Machine:
    """This machine, whose devices are like `device`."""
    return Machine(device, find_gpu(device), processes, here=True, host=HostCpu(cores()))


def machine_of(
    gpu: str | Gpu | None = None,
    *,
    memory_gib: float | None = None,
    gpus: int = 1,
    pcie: float | None = None,
    cpu_bandwidth: float | None = None,
    cpu_cores: int | None = None,
) -> Machine:
    """Find the machine that a user specifies.

    Args:
        gpu: a name (`H100`, `4090`) or an entry of the table; default: this machine.
        memory_gib: memory of a GPU otherwise unknown, or overriding the table's for `gpu`.
        pcie: GB/s of its slot, one direction, overriding the table's.
        cpu_bandwidth, cpu_cores: of the machine around it, overriding `HostCpu`'s.

    Raises:
        ConfigError: an unknown GPU, a number below one.
    """
    if gpus < 1:
        raise ConfigError(f"a run on {gpus} GPUs", where=f"--gpus {gpus}", fix="1 or more")
    if memory_gib is not None and not 0 < memory_gib < float("inf"):
        raise ConfigError(
            f"a GPU with {memory_gib:g} GiB of memory",
            where=f"--memory {memory_gib:g}",
            fix="GiB of one GPU, such as 24",
        )
    sizes = {"--pcie": pcie, "--cpu-bandwidth": cpu_bandwidth, "--cpu-cores": cpu_cores}
    for option, value in sizes.items():
        if value is not None and not 0 < value < float("inf"):
            what = f"{option.strip('-')} cannot be {value:g}"
            raise ConfigError(what, where=f"{option} {value:g}", fix=f"{option} above 0")
    if gpu is None and memory_gib is None:
        machine = this_machine(this_device(), gpus)
    elif gpu is None:
        name = f"a GPU of {memory_gib:g} GiB"
        machine = Machine(Device("cuda", name, UNNAMED, memory_gib or 0.0), None, gpus)
    else:
        line = named_gpu(gpu) if isinstance(gpu, str) else gpu
        if memory_gib is not None:
            line = line.model_copy(update={"memory_gib": memory_gib})
        machine = Machine(as_device(line), line, gpus)
    given: Any = {"cores": cpu_cores, "gb_s": cpu_bandwidth}
    host = machine.host._replace(**{name: value for name, value in given.items() if value})
    if pcie is not None and machine.gpu is not None:
        machine = replace(machine, gpu=machine.gpu.model_copy(update={"pcie_gb_s": pcie}))
    return replace(machine, host=host)
