"""Options of a job by which it shows its first answers, and stops itself."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ..errors import JobRequestError
from .conditions import check_conditions
from .values import MONEY, parse_price


def _limit(default: Any, help: str, *, expected: str = "", **rules: Any) -> Any:
    """The declaration of one option, in a part of the help of its own, as `JobSpec` declares its options."""
    shown: dict[str, Any] = {"expected": expected, "panel": "limits", "short": "", "is_common": False}
    return Field(default, description=help, json_schema_extra=shown, **rules)


_money = partial(_limit, None, expected=MONEY)


class StoppingFields(BaseModel):
    """Fields of `JobSpec`: the canary, and limits and conditions by which a job stops itself. None identifies a job."""

    model_config = ConfigDict(defer_build=True)

    canary: int | None = _limit(
        None,
        "Rows of each adapter that are answered first; their lengths, errors and examples are then shown, and the time "
        "left rests on them.",
        ge=1,
    )
    confirm: bool = _limit(
        False,
        "Run no row but the canary's until you agree: in a terminal a question, elsewhere the job stops with 5, and "
        "the next run of it goes on.",
    )
    stop_if: tuple[str, ...] = _limit(
        (),
        "Stop the job, with 5, once its rows so far meet a condition, such as 'errors > 2%' or 'cut > 90% in any "
        "adapter'; checked after the canary, and as parts are written. Repeatable (in a job file a list).",
    )
    max_seconds: float | None = _limit(
        None, "Most seconds of a run; it stops, with 5, once it is known to take longer.", gt=0, allow_inf_nan=False
    )
    max_cost: str | None = _money(
        "Most that the runs of the job may cost together, such as '20 EUR'; it stops, with 5, once it is known to cost "
        "more. Needs gpu_hour_price."
    )
    gpu_hour_price: str | None = _money(
        "Price of one worker for an hour, and its currency, such as '2.5 EUR': adds costs."
    )

    @field_validator("stop_if", mode="before")
    @classmethod
    def _read_conditions(cls, value: Any) -> Any:
        return () if value is None else (value,) if isinstance(value, str) else value

    @field_validator("max_cost", "gpu_hour_price")
    @classmethod
    def _check_money(cls, value: str | None, info: ValidationInfo) -> str | None:
        try:
            parse_price(value, info.field_name or "")
        except JobRequestError:
            raise ValueError(f"expected {MONEY}") from None
        return value

    _check_conditions = field_validator("stop_if")(check_conditions)
