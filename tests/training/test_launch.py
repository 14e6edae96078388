"""The shipped launch files: Accelerate takes its own, and the job files start what is there."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import pytest
import yaml

from finetune import load_recipe, setup_fp8_mixed_precision_training
from finetune.config.paths import list_recipes, recipes_folder
from finetune.errors import ConfigError, PrecisionError
from finetune.training.run.preflight import idle_gpus, preflight
from tests.conftest import CPU, H100

LAUNCH = recipes_folder() / "launch"


@pytest.mark.parametrize(("name", "processes", "machines"), [("1x8", 8, 1), ("2x8", 16, 2)])
def test_accelerate_loads_its_configurations(name, processes, machines) -> None:
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    file = LAUNCH / f"accelerate_{name}.yaml"
    found = load_config_from_file(str(file))
    assert isinstance(found, ClusterConfig)
    assert (found.num_processes, found.num_machines) == (processes, machines)
    assert found.distributed_type == "MULTI_GPU"
    assert found.mixed_precision == "no", "the recipe decides"


def test_accelerate_takes_the_command_of_two_machines() -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    words = ["--config_file", str(LAUNCH / "accelerate_2x8.yaml"), "--machine_rank", "1"]
    words += ["--main_process_ip", "node0", "--main_process_port", "29500", "-m", "finetune", "x"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert (args.num_processes, args.num_machines, args.machine_rank) == (16, 2, 1)
    assert args.multi_gpu
    assert not args.use_fsdp


def test_job_files_start_what_is_there() -> None:
    slurm, job = (LAUNCH / name for name in ("slurm.sh", "kubernetes.yaml"))
    subprocess.run(["bash", "-n", slurm], check=True)
    (container,) = yaml.safe_load(job.read_text())["spec"]["template"]["spec"]["containers"]
    subprocess.run(["bash", "-n", "-c", container["args"][0]], check=True)
    for text in (slurm.read_text(), container["args"][0]):
        (config,) = re.findall(r"--config_file \S*?launch/(\S+)", text)
        assert (LAUNCH / config).is_file()
        assert "resume last" in text
    assert container["env"][0]["value"] in list_recipes()
    assert "--signal=USR1@" in slurm.read_text()


@pytest.mark.parametrize("by", ["recipe", "accelerate"])
@pytest.mark.parametrize("compute", ["fp8", "bf16"])
def test_deepspeed_is_refused_before_anything_is_loaded(by, compute, monkeypatch) -> None:
    config = load_recipe(f"tiny_full_{compute}").config
    if by == "recipe":
        config = config.model_copy(update={"train": {**config.train, "deepspeed": "zero3.json"}})
    else:
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(PrecisionError, match=r"fix:[\s\S]*ZeRO-3[\s\S]*train.fsdp=true"):
        preflight(config, CPU)


@pytest.mark.parametrize("asked", [1, 2])
def test_one_process_of_several_is_refused(asked, monkeypatch) -> None:
    """Accelerate's launcher makes the environment, with its own command line."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    words = ["--cpu", "--num_processes", str(asked), "-m", "finetune", "tiny_full_fp8"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    for name, value in prepare_simple_launcher_cmd_env(args)[1].items():
        monkeypatch.setenv(name, value)
    config = load_recipe("tiny_full_fp8").config
    if asked == 1:
        preflight(config, CPU)
    else:
        with pytest.raises(ConfigError, match=r"started one[\s\S]*fix: *torchrun[^;]* SCRIPT"):
            setup_fp8_mixed_precision_training("emulated", emulation="allow", cpu=True)
        with pytest.raises(ConfigError, match=r"started one[\s\S]*fix: *torchrun"):
            preflight(config, CPU)
        for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
            monkeypatch.setenv(name, value)
        preflight(config, CPU)


def test_sharding_by_accelerate_alone_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=r"the recipe does not[\s\S]*train.fsdp=true"):
        preflight(load_recipe("tiny_full_fp8").config, CPU)


def test_gpus_that_one_process_leaves_idle_are_said(monkeypatch) -> None:
    """Transformers would split each batch over them by nn.DataParallel, past the preparation."""
    eight = replace(H100, count=8)
    (line,) = idle_gpus(eight)
    assert "1 of 8 GPUs trains" in line
    assert "--nproc_per_node=8" in line
    assert not idle_gpus(H100)
    assert not idle_gpus(CPU)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert not idle_gpus(eight)


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("version", "1", "2"),
        ("fsdp_version", "1", "2"),
        ("auto_wrap_policy", "SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP"),
        ("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP"),
    ],
)
def test_sharding_other_than_by_layers_with_fsdp2_is_refused(
    key, value, instead, monkeypatch
) -> None:
    """Both ended in an error of torch's or of the proof, whose fix did not help."""
    monkeypatch.setattr("finetune.config.sft.refuse_sharding_on_cpu", lambda: None)

    def check(*words: str) -> None:
        preflight(load_recipe("tiny_full_fp8", ["train.fsdp=true", *words]).config, CPU)

    with pytest.raises(ConfigError, match=rf"fix: *\w+: {instead} there"):
        check(f"train.fsdp_config={{{key}: {value}}}")
    check(f"train.fsdp_config={{{key}: {instead}}}")
    check(f"train.fsdp_config={{{key}: {value}}}", "~train.fsdp_config")
