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

# Each sees what those before it have made, and a later mixin comes in front of an earlier one.
CASES: tuple[Case, ...] = (
    stored_layers,  # first: later cases tell a layer of codes by its class
    linear_layers,
    masters_in_host_memory,  # takes the weights that no linear layer has put away
    converted_experts,
    planned_parameters,  # in front of the experts' own forward
    mlps,  # joins layers that `linear_layers` has changed
    overridden,  # in front of all of these: the user's type holds around them
    fused_layers,  # looks at the forward that a base has by now: an overridden one is left alone
    fused_head,  # changes no class
)
