"""Types of the columns that the stages of a job have in its output."""

from __future__ import annotations

import pyarrow as pa

from ..options.stages import Stage, stages_of
from ..record import JobRecord
from ..spec import JobSpec
from ..stages import stage_record
from .columns import (
    CHOICE_SCORES_FIELD,
    CHOICE_SHARES_FIELD,
    STAGED_FIELDS,
    answer_fields,
    completion_fields,
    output_name,
)

#: Field of a stage with a choice: the probability of each text, by text; the probabilities add up to 1.
PROBABILITY = "probability"
#: Fields of a pick beside those of the result that was taken: its number by which it was taken, and its place.
PICK_FIELDS = (pa.field("by", pa.float64()), pa.field("index", pa.int32()))


def output_stages(spec: JobSpec) -> tuple[Stage, ...]:
    """The stages that have a column in the output, in order."""
    stages = stages_of(spec.stages)
    return tuple(stage for stage in stages if not spec.output_columns or stage.name in spec.output_columns)


def stage_struct(record: JobRecord, stage: Stage) -> pa.StructType:
    """The type of one result of a stage."""
    if stage.pick is not None:
        picked = next(one for one in stages_of(record.spec.stages) if one.name == stage.pick)
        return pa.struct([*stage_struct(record, picked), *PICK_FIELDS])
    of_stage = stage_record(record, stage)
    fields = [field for field in completion_fields(of_stage) if field not in (CHOICE_SCORES_FIELD, CHOICE_SHARES_FIELD)]
    sampling = of_stage.spec.sampling
    if sampling.scores_choices:
        texts = dict.fromkeys(sampling.choice)
        fields.append(pa.field(PROBABILITY, pa.struct([pa.field(text, pa.float64()) for text in texts])))
    return pa.struct(fields)


def output_fields(record: JobRecord) -> tuple[pa.Field, ...]:
    """The columns that a job adds to those of its input, under the names that they have in its output."""
    if record.spec.stages is None:
        return answer_fields(record)
    found = []
    for stage in output_stages(record.spec):
        struct = stage_struct(record, stage)
        found.append(pa.field(stage.name, pa.list_(struct) if stage.is_list else struct))
    return (*found, *(field.with_name(output_name(record, field.name)) for field in STAGED_FIELDS))
