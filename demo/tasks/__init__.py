"""The tasks that the demo's adapters were trained on, one file per task. All of their texts are made here, by seed."""

from __future__ import annotations

from .contacts import CONTACTS
from .pirate import PIRATE
from .sentiment import SENTIMENT
from .sql import SQL
from .task import Example, Split, Task

TASKS: dict[str, Task] = {task.name: task for task in (SENTIMENT, CONTACTS, PIRATE, SQL)}

__all__ = ["TASKS", "Example", "Split", "Task"]
