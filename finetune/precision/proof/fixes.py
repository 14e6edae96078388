"""Fix of an error about layers that ran in another type than planned."""

from __future__ import annotations

from collections.abc import Set


def fix_of(requested: str, *, training: bool, silent: bool, roles: Set[str]) -> str:
    """Return the fix of a proof's error.

    Args:
        requested: compute type of the run.
        training: False if the model was in evaluation mode.
        silent: True if layers were called and multiplied nothing.
        roles: roles of the layers that ran in another type.
    """
    if not training:
        return (
            "model.train() before the step: in evaluation mode (model.eval()) layers multiply in "
            "high precision"
        )
    if requested == "fp32":
        return "model.dtype=float32, and no autocast around the step"
    if roles == {"head"}:
        return (
            "leave `output` out of precision.map: SFTTrainer multiplies the output head inside its "
            "loss, past the head's layer, unless it is frozen and stored in FP8 (frozen='fp8')"
        )
    if silent:
        return (
            "call the layer, since what is multiplied outside of it stays in high precision; a "
            "declared parameter is multiplied by finetune.fp8_matmul, itself or as a view, not as "
            "a copy; precision.keep=[NAME] leaves it in high precision"
        )
    return (
        "replace or move layers before the model is prepared, and call the prepared model itself; "
        "precision.keep=[NAME] leaves a layer in high precision whose weight something else "
        "multiplies, as peft's target_parameters and HRA do; the plan is shown by "
        "`python -m finetune validate RECIPE`"
    )
