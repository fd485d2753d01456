"""Field types of the API: as tolerant as JSON numbers need (4.0 is 4), and no further ("4" and true are no numbers)."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, StrictBool, StrictStr, model_validator


def _number(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise ValueError(f"must be a number, not {type(value).__name__}")
    return value


Integer = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number)]
Flag = StrictBool
Text = StrictStr


class RequestBody(BaseModel):
    """Base of all request bodies. Unknown fields are accepted, as vLLM does, and counted."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True, protected_namespaces=())

    model: Text | None = None
    """Served model or alias; may be left out."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data

    @property
    def unknown_fields(self) -> list[str]:
        return sorted(self.__pydantic_extra__ or ())
