"""How far the shipped estimator is from published measurements.

    python -m tests.benchmarks.score tests/benchmarks/score/measured_runs.csv [--json]

A row of a csv file (`rows`) becomes a `Job` (`jobs`) on a model known by its shape (`shapes`), the
job a `RunConfig` that is rehearsed and measured by the functions behind `estimate` (`memory`), with
the differences of the libraries of the row's time put in place (`published_stack`, `losses`,
`foak`, `fsdp1`). `scoreboard` compares, one kind of memory at a time, beside another estimator
(`baselines`). No row is dropped silently, and no row has a correction of its own. Speeds are in
`speed` and `published`: operators of a step written from sizes (`workload`, `writer`, `casts`,
`records`), timed by the shipped roofline.

`measured_runs.csv`: 551 measurements of memory and speed that others published; figures, each with
its `source` (repository, commit and file, or page). Columns: `gpu`, `n_gpus`, `model`, `params_b`
(10^9); `method` (`full`, `lora`, `qlora`, `peft:NAME`), `lora_rank`, `lora_targets`; `precision`,
`optimizer`; `batch_per_gpu` (rows), `seq_len` (tokens); `grad_ckpt`, `attention`, `fused_ce`,
`framework` (with versions); `peak_mem_gb` (10^9 bytes, empty after an out-of-memory error),
`mem_kind` (`allocated`, `reserved`, `nvidia-smi`, `unknown`); `tokens_per_s`, `step_time_s`;
`notes` (SUSPECT: physically impossible or extrapolated, never scored); `verified` (read at the
source).
"""
