"""Draws the pictures of the page on the journey of a row: `python -m lorabatch.benchmarks.journey.pictures`.

Each is made by code of this project where that says what is in it: the states of a row by their table, shards by the
planner, the places of pages by the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from lorabatch.benchmarks.journey.svg import COLOURS, INK, PALE, QUIET, Picture, Point
from lorabatch.engine.memory.pool import PagePool, PageRange
from lorabatch.pipeline.supervisor.rows import TRANSITIONS, RowEvent, RowState
from lorabatch.scheduler.planning.waves import ShardPlan, plan_shards
from lorabatch.scheduler.workload import BASE_MODEL, AdapterInfo, Workload

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


def processes() -> Picture:
    """Processes of a job with two workers, and the messages between them."""
    picture = Picture("Processes of a job and the messages between them", 920, 690)
    text, arrow = picture.text, picture.arrow
    picture.box((20, 20), (250, 56), "client", ["freezes job.json, follows the job"], PALE[0])
    picture.rectangle((20, 126), (880, 34), PALE[4])
    text((460, 148), "Dask scheduler: carries tasks, their results and topics, and no prompts", anchor="middle")
    arrow((50, 76), (50, 126))
    text((58, 106), "task run_job", size=12)
    arrow((160, 126), (160, 76))
    text((168, 106), "PublishedState", size=12)

    picture.rectangle((20, 250), (210, 170), PALE[1])
    text((125, 274), "coordinator task", anchor="middle", is_bold=True)
    text((125, 292), ["run_job, on any worker"], anchor="middle", colour=QUIET, size=12)
    picture.box((38, 310), (174, 92), "Scheduler", ["event in,", "commands out"])
    arrow((40, 160), (40, 250))
    text((48, 200), ["run_job"], size=12)
    arrow((112, 250), (112, 160))
    text((120, 184), ["index_chunk(ChunkRef)", "run_shard(RunShard)", "PublishedState"], size=12)

    for number, left in enumerate((310, 670)):
        picture.rectangle((left, 250), (230, 170), PALE[2])
        text((left + 115, 274), f"worker {number}", anchor="middle", is_bold=True)
        picture.box((left + 16, 286), (198, 44), "run_shard", ["one task for each open shard"])
        picture.box((left + 16, 362), (198, 44), "supervisor", ["queue of rows, RowTable"])
        arrow((left + 60, 330), (left + 60, 362))
        text((left + 66, 351), "rows", size=12)
        arrow((left + 130, 362), (left + 130, 330))
        text((left + 136, 351), "ServedRow", size=12)
        arrow((left + 14, 160), (left + 14, 250))
        text((left + 22, 184), ["index_chunk", "run_shard"], size=12)
        arrow((left + 116, 250), (left + 116, 160))
        text((left + 124, 184), ["ChunkSummary", "ShardOutcome", "WorkerReport"], size=12)

        held = ["base model, pages,", "running batch"]
        picture.box((left, 500), (176, 66), f"engine process {number}", held, PALE[3])
        arrow((left + 10, 420), (left + 10, 500))
        text((left + 16, 446), ["Start", "AddRows", "ExportRows"], size=12)
        arrow((left + 94, 500), (left + 94, 420))
        text((left + 100, 446), ["Results", "EngineTelemetry", "Heartbeat"], size=12)
        arrow((left + 204, 420), (left + 204, 616), is_double=True)
        text((left + 198, 600), "rows, journals, parts", size=12, anchor="end")

    arrow((230, 334), (310, 334))
    text((270, 326), "LendRows", anchor="middle", size=12)
    arrow((540, 334), (670, 334), is_double=True)
    text((605, 310), ["ReceiveRows", "FetchResults"], anchor="middle", size=12)
    text((605, 352), "FetchAdapter", anchor="middle", size=12)
    arrow((125, 420), (125, 616), is_double=True)
    text((133, 500), ["plan", "events.jsonl", "state.json", "_SUCCESS"], size=12)
    picture.rectangle((20, 616), (880, 54), PALE[4])
    text((460, 638), "storage", anchor="middle", is_bold=True)
    text((460, 656), "input, adapters and base model; the output folder", anchor="middle", colour=QUIET, size=12)
    return picture


#: State of an unfinished or finished row -> place of its box, and what is written in it.
STATES: Mapping[RowState, tuple[Point, str]] = {
    RowState.WAITING: ((50, 150), "in the queue"),
    RowState.SENT: ((290, 150), "in the engine process"),
    RowState.EXPORTING: ((530, 150), "asked to be given up"),
    RowState.LENT: ((770, 150), "with another worker"),
    RowState.SUSPECT: ((410, 290), "runs apart"),
    RowState.FINISHED: ((290, 440), "result delivered"),
    RowState.DROPPED: ((530, 440), "shard was closed"),
}
_STATE_SIZE = (160.0, 52.0)
#: Events that lead from every unfinished state to the same one: an arrow from the frame around these.
FROM_ANY: Mapping[RowEvent, RowState] = {RowEvent.FINISH: RowState.FINISHED, RowEvent.DROP: RowState.DROPPED}
#: Any other event, state before and state after -> points of its arrow, and the middle of its label.
EDGES: Mapping[tuple[RowEvent, RowState, RowState], tuple[tuple[Point, ...], Point]] = {
    (RowEvent.SEND, RowState.WAITING, RowState.SENT): (((210, 166), (290, 166)), (250, 160)),
    (RowEvent.SEND, RowState.SUSPECT, RowState.SENT): (((440, 290), (390, 202)), (388, 256)),
    (RowEvent.EXPORT, RowState.SENT, RowState.EXPORTING): (((450, 176), (530, 176)), (490, 168)),
    (RowEvent.EXPORT, RowState.EXPORTING, RowState.EXPORTING): (((650, 202), (690, 262), (674, 202)), (716, 238)),
    (RowEvent.LEND, RowState.EXPORTING, RowState.LENT): (((690, 176), (770, 176)), (730, 168)),
    (RowEvent.RETURN, RowState.SENT, RowState.WAITING): (((290, 188), (210, 188)), (250, 204)),
    (RowEvent.RETURN, RowState.EXPORTING, RowState.WAITING): (((600, 150), (370, 70), (150, 150)), (372, 103)),
    (RowEvent.RETURN, RowState.LENT, RowState.WAITING): (((840, 150), (460, 0), (110, 150)), (466, 68)),
    (RowEvent.SUSPECT, RowState.SENT, RowState.SUSPECT): (((425, 202), (475, 290)), (486, 240)),
    (RowEvent.SUSPECT, RowState.EXPORTING, RowState.SUSPECT): (((585, 202), (535, 290)), (594, 262)),
}


def row_states() -> Picture:
    """States of a row in front of an engine, and the events that change them."""
    picture = Picture("States of a row in front of an engine", 980, 520)
    unfinished = set(STATES) - set(FROM_ANY.values())
    picture.rectangle((20, 20), (940, 350), "#f6f8fa", dashes="5 4")
    picture.text((36, 358), "unfinished", colour=QUIET)
    for event, changes in TRANSITIONS.items():
        if set(changes) == unfinished and set(changes.values()) == {FROM_ANY.get(event)}:
            (left, top), _ = STATES[FROM_ANY[event]]
            picture.arrow((left + 80, 370), (left + 80, top))
            picture.text((left + 88, 410), event.value)
            continue
        for before, after in changes.items():
            points, label = EDGES[event, before, after]
            picture.arrow(*points)
            picture.text(label, event.value, anchor="middle")
    for state in {state for changes in TRANSITIONS.values() for pair in changes.items() for state in pair}:
        assert state in STATES, f"state {state.value} has no place in the picture"
    for state, (place, note) in STATES.items():
        picture.box(place, _STATE_SIZE, state.value, [note], PALE[2] if state in unfinished else PALE[4])
    return picture


# Rows of each adapter of the job in the picture of shards, and of the base model.
_ROWS = {"a": 18, "b": 12, "c": 3, "d": 3, "": 6}
_ADAPTERS = tuple(name for name in _ROWS if name)
_CELL = 15.0


def small_plan() -> tuple[list[int], ShardPlan]:
    """The plan of a small job by the planner. Returns the adapter of each row, as a place in `_ROWS`, and the plan."""
    mixed = np.random.default_rng(5).permutation(np.repeat(np.arange(len(_ROWS)), list(_ROWS.values())))
    workload = Workload(
        adapters=tuple(AdapterInfo(name, rank=8, weight_bytes=1) for name in _ADAPTERS),
        adapter_index=np.where(mixed < len(_ADAPTERS), mixed, BASE_MODEL).astype(np.int32),
        prompt_tokens=np.full(len(mixed), 60, np.int32),
        max_tokens=np.full(len(mixed), 20, np.int32),
        prefix_hash=np.zeros(len(mixed), np.uint64),
    )
    return mixed.tolist(), plan_shards(workload, batch_rows=8, num_replicas=2, rows_per_shard=6)


def wave_shard_part() -> Picture:
    """Rows of a job: as the input has them, sorted into waves, cut into shards, written as parts."""
    picture = Picture("Wave, shard and part", 890, 396)
    adapters, plan = small_plan()

    def rows(left: float, top: float, of: list[int]) -> None:
        for number, row in enumerate(of):
            place = left + number * _CELL, top
            picture.rectangle(place, (_CELL - 2, 26), COLOURS[adapters[row]], "none", radius=2)

    def note(top: float, title: str, lines: list[str]) -> None:
        picture.text((20, top), title, is_bold=True)
        picture.text((20, top + 16), lines, colour=QUIET, size=12)

    left = 140.0
    note(52, "input", ["rows in any order"])
    rows(left + 10, 40, list(range(len(adapters))))
    for number, name in enumerate(_ROWS):
        at = left + 10 + number * 118
        picture.rectangle((at, 14), (12, 12), COLOURS[number], "none", radius=2)
        picture.text((at + 18, 25), f"adapter {name}" if name else "base model", size=12)

    note(132, "waves", ["sorted by adapter"])
    note(212, "shards", ["about equal work"])
    note(312, "parts", ["one file a shard"])
    order = sorted(plan.shards, key=lambda shard: (shard.wave_id, shard.shard_id))
    at = left
    for wave_id in dict.fromkeys(shard.wave_id for shard in order):
        shards = [shard for shard in order if shard.wave_id == wave_id]
        width = sum(shard.num_rows for shard in shards) * _CELL + (len(shards) - 1) * 8
        picture.rectangle((at - 4, 106), (width + 6, 62), "#f6f8fa", dashes="5 4")
        picture.text((at + width / 2, 122), f"wave {wave_id}", anchor="middle", size=12)
        begin = at
        rows(begin + (len(shards) - 1) * 4, 132, [int(row) for shard in shards for row in plan.rows_of(shard.shard_id)])
        for shard in shards:
            width = shard.num_rows * _CELL
            picture.rectangle((at - 3, 196), (width + 4, 52), "#ffffff")
            picture.text((at + width / 2, 210), f"shard {shard.shard_id}", anchor="middle", size=12)
            rows(at, 217, plan.rows_of(shard.shard_id).tolist())
            picture.arrow((at + width / 2, 248), (at + width / 2, 292))
            picture.rectangle((at - 3, 292), (width + 4, 40), PALE[0])
            picture.text((at + width / 2, 309), "part-", anchor="middle", size=12)
            picture.text((at + width / 2, 325), f"{shard.shard_id:05d}", anchor="middle", size=12)
            at += width + 8
        at += 10
    picture.text(
        (left, 364),
        [
            "Shards are numbered in the order in which they should be opened, those with most work first.",
            "A shard is one Dask task on one worker. Adapters with few rows share a wave.",
        ],
        size=12,
        colour=QUIET,
    )
    return picture


def modes() -> Picture:
    """The three modes: weights in memory, and products for the rows of each adapter."""
    picture = Picture("The modes unmerged, merged and mixture", 850, 320)
    panels = (
        ("unmerged", "W", None, ((0, "W x + B₁ A₁ x"), (1, "W x + B₂ A₂ x"), (4, "W x"))),
        ("merged", "W + B₁ A₁", 0, ((0, "(W + B₁ A₁) x"),)),
        (
            "mixture",
            "W + B₁ A₁",
            0,
            (
                (0, "(W + B₁ A₁) x"),
                (1, "(W + B₁ A₁) x − B₁ A₁ x + B₂ A₂ x"),
                (4, "(W + B₁ A₁) x − B₁ A₁ x"),
            ),
        ),
    )
    names = {0: "rows of adapter 1", 1: "rows of adapter 2", 4: "rows of the base model"}
    for (mode, weights, merged, segments), left, width in zip(panels, (20, 275, 530), (240, 240, 300), strict=True):
        picture.rectangle((left, 20), (width, 240), "#f6f8fa")
        picture.text((left + 14, 44), mode, is_bold=True, size=15)
        picture.text((left + 14, 72), "weights in memory", colour=QUIET, size=12)
        picture.rectangle((left + 138, 56), (94, 24), PALE[4 if merged is None else merged], INK)
        picture.text((left + 185, 73), weights, anchor="middle")
        for number, (adapter, formula) in enumerate(segments):
            top = 98 + number * 52
            picture.rectangle((left + 14, top), (8, 40), COLOURS[adapter], "none", radius=2)
            picture.text((left + 32, top + 14), names[adapter], colour=QUIET, size=12)
            picture.text((left + 32, top + 34), formula)
    picture.text(
        (20, 286),
        [
            "W: weights of the base model. B, A: matrices of an adapter, scaling included. x: a token's activations.",
            "A merged step has rows of one adapter only. In a mixture, other rows take the merged adapter out again.",
        ],
        colour=QUIET,
        size=12,
    )
    return picture


_PAGE = 25.0
_PAGES_A_LINE = 34


def page_pool() -> Picture:
    """The pages of a pool on a CPU, and the block tables of rows on a GPU."""
    picture = Picture("The page pool", 890, 440)
    picture.text((20, 34), "On a CPU each row and each adapter has one contiguous run of pages", is_bold=True)
    pool = PagePool(2 * _PAGES_A_LINE)
    for name, pages in (("adapter 1", 6), ("adapter 2", 4), ("row 7", 8), ("row 8", 8), ("row 9", 8)):
        pool.allocate(name, pages)
    pool.release("row 8")
    _draw_free(picture, 48, pool.num_pages)
    for name, fill in {"adapter 1": COLOURS[0], "adapter 2": COLOURS[1], "row 7": PALE[0], "row 9": PALE[1]}.items():
        _draw_run(picture, 48, pool.range_of(name), name, fill)
    for number in range(3):
        pool.allocate(number, 1, from_end=True)
        _draw_run(picture, 48, pool.range_of(number), "", PALE[2])
    picture.text(
        (20, 136),
        [
            "White pages are free: row 8 has ended, and the next row of its size takes its place.",
            "Green pages are the prefix cache: rows that begin alike copy them into their own runs.",
        ],
        colour=QUIET,
        size=12,
    )
    picture.text((20, 196), "On a GPU a row's block table names its pages one by one", is_bold=True)
    grown = _grown_pool()
    _draw_free(picture, 210, grown.num_pages)
    _draw_run(picture, 210, grown.range_of("adapter 1"), "adapter 1", COLOURS[0])
    shared = [grown.range_of(prefix).start for prefix in ("prefix 0", "prefix 1")]
    for number, name in enumerate(("row 7", "row 8")):
        runs = grown.runs_of(name)
        table = [*shared, *(page for run in runs for page in range(run.start, run.end))]
        top = 262 + number * 40
        picture.text((20, top + 17), f"block table of {name}")
        for place, page in enumerate(table):
            fill = PALE[2] if page in shared else PALE[number]
            _draw_run(picture, 210, PageRange(page, 1), str(page), fill)
            _draw_run(picture, top, PageRange(7 + place, 1), str(page), fill)
    picture.text(
        (20, 362),
        [
            "Both tables name the pages of their common beginning. Rows take another page when they need one.",
            "A page has the keys and values of 16 tokens in all layers. An adapter takes the pages that it fills.",
            "Where pages run out, prefix pages that no row waits for go first, then adapters that no running row uses.",
        ],
        colour=QUIET,
        size=12,
    )
    return picture


def _grown_pool() -> PagePool:
    """A pool in which row 8 has found the first pages of row 7 in the prefix cache, and both rows have grown."""
    pool = PagePool(_PAGES_A_LINE)
    for name, pages in (("adapter 1", 6), ("row 7", 4), ("row 8", 4)):
        pool.allocate(name, pages)
    for prefix in ("prefix 0", "prefix 1"):
        pool.pass_first("row 7", prefix)
        pool.release_first("row 8")
    for name in ("row 8", "row 7", "row 7", "row 7"):
        pool.extend(name)
    return pool


def _draw_free(picture: Picture, top: float, num_pages: int) -> None:
    for page in range(num_pages):
        _draw_run(picture, top, PageRange(page, 1), "", "#ffffff")


def _draw_run(picture: Picture, top: float, run: PageRange, name: str, fill: str) -> None:
    """Draw a run, which does not reach over the end of a line, with a mark at the beginning of each page."""
    line, column = divmod(run.start, _PAGES_A_LINE)
    x, y = 20 + column * _PAGE, top + line * 36
    picture.rectangle((x, y), (run.num_pages * _PAGE - 1, 26), fill, radius=1)
    for page in range(1, run.num_pages):
        picture.line((x + page * _PAGE, y + 20), (x + page * _PAGE, y + 26))
    middle = x + run.num_pages * _PAGE / 2
    picture.text((middle, y + 17), name, anchor="middle", colour="#ffffff" if fill in COLOURS else INK, size=12)


#: File in `docs/pictures` -> function that draws it.
PICTURES: Mapping[str, Callable[[], Picture]] = {
    "processes.svg": processes,
    "row-states.svg": row_states,
    "wave-shard-part.svg": wave_shard_part,
    "modes.svg": modes,
    "page-pool.svg": page_pool,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw().svg(), encoding="utf-8")
