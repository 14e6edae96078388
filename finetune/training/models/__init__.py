"""Models of our own, known to the `Auto` classes of Transformers once this package is imported.

import finetune.training.models
model = AutoModelForCausalLM.from_pretrained("runs/bdh_tiny_full_bf16/.../model")
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from finetune.training.models.bdh import BdhBlock, BdhConfig, BdhForCausalLM, BdhModel

AutoConfig.register(BdhConfig.model_type, BdhConfig, exist_ok=True)
AutoModel.register(BdhConfig, BdhModel, exist_ok=True)
AutoModelForCausalLM.register(BdhConfig, BdhForCausalLM, exist_ok=True)

__all__ = ["BdhBlock", "BdhConfig", "BdhForCausalLM", "BdhModel"]
