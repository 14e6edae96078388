#!/usr/bin/env bash
# Two machines with 8 GPUs each under Slurm:
#
#   sbatch recipes/launch/slurm.sh llama_70b_lora_fp8 train.save_strategy=steps train.save_steps=200
#
# USR1 comes five minutes before the time limit: the run ends its step, saves and exits with 138; the
# job is then queued again, and goes on from the newest checkpoint.
#SBATCH --job-name=finetune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

export MASTER_ADDR MASTER_PORT=29500 RUNS="runs/slurm-$SLURM_JOB_ID"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
words=("$@")
if compgen -G "$RUNS/*/*/checkpoints/checkpoint-*" >/dev/null; then
  words=(resume last)  # queued again
fi

# The launcher knows no USR1, and gives its processes 30 s after a SIGTERM: they are signalled
# themselves, and it runs in a session of its own, out of reach.
one_machine() {
  setsid accelerate launch --config_file recipes/launch/accelerate_2x8.yaml \
    --machine_rank "$SLURM_NODEID" --main_process_ip "$MASTER_ADDR" \
    --main_process_port "$MASTER_PORT" -m finetune "$@" --out "$RUNS" &
  launcher=$!
  trap 'kill -USR1 $(cat /proc/$launcher/task/$launcher/children)' USR1
  wait "$launcher" || wait "$launcher"  # the first one ends with the signal
}
export -f one_machine

code=0
srun --kill-on-bad-exit=1 bash -c 'one_machine "$@"' finetune "${words[@]}" || code=$?
if compgen -G "$RUNS/*/*/receipt.json" >/dev/null && grep -ls '"interrupted": true' \
  "$(ls -td "$RUNS"/*/*/ | head -n 1)receipt.json" >/dev/null; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
