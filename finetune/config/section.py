"""Base of the sections of a recipe."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen block of a recipe in which an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        ser_json_inf_nan="constants",
        defer_build=True,  # validators are built where a recipe is read: a tenth of a second
    )

    def _changed(self, *names: str) -> list[str]:
        """Those of `names` whose value is not the default."""
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].default]
