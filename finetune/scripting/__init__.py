"""Calls for notebooks and scripts: `finetune.load`, `add_lora`, `trainer`."""
