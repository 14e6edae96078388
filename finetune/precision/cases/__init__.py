"""Each kind of module that a conversion changes, a file a kind, in the order of `CASES`."""

from finetune.precision.cases.case import Case
from finetune.precision.cases.experts import converted_experts
from finetune.precision.cases.head import fused_head
from finetune.precision.cases.linear import linear_layers, mlps
from finetune.precision.cases.lora import fused_layers
from finetune.precision.cases.masters import masters_in_host_memory
from finetune.precision.cases.override import overridden
from finetune.precision.cases.parameters import planned_parameters
from finetune.precision.cases.stored import stored_layers

CASES: tuple[Case, ...] = (
    stored_layers,
    linear_layers,
    masters_in_host_memory,
    converted_experts,
    planned_parameters,
    mlps,
    overridden,
    fused_layers,
    fused_head,
)
