"""Writes the answers of a scored sweep as the logs of two evaluation tools: lm-eval and inspect_ai.

    python eval_logs.py OUTPUT FOLDER --format lm-eval    samples_*.jsonl and results_*.json, a folder for each adapter
    python eval_logs.py OUTPUT FOLDER --format inspect    an eval log for each adapter; needs the package inspect-ai

OUTPUT is the folder of a job with `expected`. The logs have what the job has: answers, right answers and scores.
"""

import argparse
import hashlib
import json
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import lorabatch


def rows_by_adapter(output):
    """Name of each adapter -> its rows in the order of their ids; "base" is the base model."""
    found = defaultdict(list)
    for row in lorabatch.Job(output).to_arrow(wide=False).to_pylist():
        found[row.get("adapter") or "base"].append(row)
    return {name: sorted(rows, key=lambda row: str(row["id"])) for name, rows in found.items()}


def sha256(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def write_lm_eval(rows, folder, task, options):
    """One task's files, in the form of `lm_eval --log_samples`."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{task}_{datetime.now(UTC):%Y-%m-%dT%H-%M-%S.%f}"
    scored = [row["score"] for row in rows if row["score"] is not None]
    with open(folder / f"samples_{name}.jsonl", "w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            prompt = row[options["prompt"]]
            asked = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
            doc = {column: row[column] for column in (options["id"], options["prompt"], options["expected"])}
            sample = {
                "doc_id": number,
                "doc": doc,
                "target": row[options["expected"]],
                "arguments": {"gen_args_0": {"arg_0": asked, "arg_1": options["generation"]}},
                "resps": [[row["completion"] or ""]],
                "filtered_resps": [row["completion"] or ""],
                "filter": "none",
                "metrics": ["acc"],
                "doc_hash": sha256(doc),
                "prompt_hash": sha256(asked),
                "target_hash": sha256(row[options["expected"]]),
                "acc": row["score"],
            }
            file.write(json.dumps(sample, ensure_ascii=False, default=str) + "\n")
    mean = sum(scored) / len(scored) if scored else None
    results = {
        "results": {task: {"alias": task, "acc,none": mean}},
        "n-samples": {task: {"original": len(rows), "effective": len(scored)}},
        "configs": {task: {"task": task, "output_type": "generate_until", "generation_kwargs": options["generation"]}},
        "versions": {task: 1},
        "n-shot": {task: 0},
        "higher_is_better": {task: {"acc": True}},
        "model_name": folder.name,
    }
    (folder / f"results_{name.removeprefix(f'{task}_')}.json").write_text(json.dumps(results, indent=1, default=str))


def write_inspect(rows, folder, task, adapter, options):
    """One eval log, as `inspect_ai` writes it itself."""
    from inspect_ai.log import (
        EvalConfig,
        EvalDataset,
        EvalLog,
        EvalMetric,
        EvalResults,
        EvalSample,
        EvalScore,
        EvalSpec,
        EvalStats,
        write_eval_log,
    )
    from inspect_ai.model import ModelOutput, ModelUsage
    from inspect_ai.scorer import Score

    folder.mkdir(parents=True, exist_ok=True)
    samples = [
        EvalSample(
            id=row["id"],
            epoch=1,
            input=row[options["prompt"]],
            target=str(row[options["expected"]]),
            output=ModelOutput.from_content(adapter, row["completion"] or "", error=row["error"]),
            scores={} if row["score"] is None else {"score": Score(value=row["score"], answer=row["completion"])},
            metadata={"adapter_sha256": row["adapter_sha256"], "finish_reason": row["finish_reason"]},
        )
        for row in rows
    ]
    scored = [row["score"] for row in rows if row["score"] is not None]
    mean = EvalMetric(name="mean", value=sum(scored) / len(scored)) if scored else None
    prompt, generated = (sum(row[name] for row in rows) for name in ("prompt_tokens", "completion_tokens"))
    usage = ModelUsage(input_tokens=prompt, output_tokens=generated, total_tokens=prompt + generated)
    log = EvalLog(
        status="success",
        eval=EvalSpec(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            task=task,
            model=f"lorabatch/{adapter}",
            dataset=EvalDataset(name=task, samples=len(rows), sample_ids=[row["id"] for row in rows]),
            config=EvalConfig(),
        ),
        results=EvalResults(
            total_samples=len(rows),
            completed_samples=len(rows),
            scores=[EvalScore(name="score", scorer="score", metrics={"mean": mean} if mean else {})],
        ),
        stats=EvalStats(model_usage={f"lorabatch/{adapter}": usage}),
        samples=samples,
    )
    write_eval_log(log, str(folder / f"{task}_{adapter}.eval"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=["lm-eval", "inspect"], required=True)
    parser.add_argument("--task", default="sweep")
    parser.add_argument("--id", default="id")
    parser.add_argument("--prompt", default="prompt", help="the column of prompts")
    parser.add_argument("--expected", default="label", help="the column of right answers")
    given = parser.parse_args()
    options = {"id": given.id, "prompt": given.prompt, "expected": given.expected, "generation": {"temperature": 0.0}}
    for adapter, rows in rows_by_adapter(given.output).items():
        if given.format == "lm-eval":
            write_lm_eval(rows, given.folder / adapter, given.task, options)
        else:
            write_inspect(rows, given.folder, given.task, adapter, options)
        print(f"{adapter}: {len(rows):,} answers")


if __name__ == "__main__":
    main()
