"""The short table that ends a run."""

from __future__ import annotations

from typing import Any


def as_table(result: dict[str, Any]) -> str:
    """The report of a run: a line for each measurement, then names of what failed, was skipped, or came too late."""
    lines = [f"{result['model']} on {result['machine']['device']}, {result['machine']['date']}"]
    missing = [
        f"{name} {how}: {value[how]}"
        for name, value in result.items()
        for how in ("failed", "skipped")
        if isinstance(value, dict) and how in value
    ]
    missing += [f"{name}, no time left for: {'; '.join(late)}" for name, late in result.get("left_out", {}).items()]
    result = {name: found_until_then(value) for name, value in result.items()}
    lines += _section(
        result, "kernels", "kernel                batch tokens adapters         us   floor  fraction", _kernel
    )
    lines += ["", *(f"{name}: {answer}" for name, answer in result.get("probe", {}).items())]
    ceilings = result.get("ceilings", {})
    lines += ["", *(f"{name:<22}{value:>10.4g}" for name, value in ceilings.items() if _is_number(value))]
    switches = result.get("switches", {})
    lines += ["", *(f"{name:<18}{value:>8.2f}" for name, value in switches.items() if isinstance(value, float))]
    lines += [f"{name:<38}{value:>10.1f}" for name, value in result.get("loading", {}).items() if _is_number(value)]
    engine, exact = result.get("engine", {}), result.get("exact", {})
    for title, rows in (("", engine), (", mode exact", exact)):
        lines += [
            "",
            f"batch context adapters   step ms  base ms  of base (from, to){title}",
            *map(_decoding, rows.get("decoding", [])),
        ]
    steady = result.get("steady", {})
    lines += [
        "",
        "adapters  drawn  output t/s  steps  with prompts  by graph: decode, mixed  host waits s",
        *map(_job, steady.get("jobs", [])),
    ]
    lines += ["", "batch  prompt adapters   rank      mode  prefill t/s  decode t/s   step ms  of base"]
    lines += [_point(row) for row in engine.get("points", [])]
    lines += [f"{_point(row)}, mode exact" for row in exact.get("points", [])]
    for rows in (engine, exact):
        lines += [f"point failed: {point}" for point in rows.get("failed_points", [])]
        lines += [f"point too large for the pool: {point}" for point in rows.get("too_large", [])]
    ours = result["ours"] if isinstance(result.get("ours"), list) else []
    lines += ["", *(_ours(row) for row in ours)]
    for peer in ("peft", "vllm", "vllm_base"):
        lines += ["", *(f"{peer} {name}: {value}" for name, value in result.get(peer, {}).items())]
    lines += _section(result, "layer", "batch  adapters   rank  us/layer of base", _layer)
    lines += [f"{name}: {why}" for name, why in result.get("sanitizer", {}).items() if why]
    compiled = result.get("compile", {})
    lines += [f"not compiled, {name}: {why}" for name, why in compiled.get("not_compiled", {}).items()]
    return "\n".join([*lines, "", *missing])


def problems_of(result: dict[str, Any]) -> list[str]:
    """Problems that the checks found, and a line with the reason if the checks failed or were skipped."""
    checks = result.get("problems", [])
    if isinstance(checks, dict):
        found = checks.get("until_then") or []
        return [*found, *(f"checks {key}: {checks[key]}" for key in ("failed", "skipped") if key in checks)]
    return list(checks)


def found_until_then(value: Any) -> Any:
    """A section's results, or those it had when it failed; nothing of one that was skipped."""
    if not isinstance(value, dict) or not value.keys() & {"failed", "skipped"}:
        return value
    return value.get("until_then") or {}


def _section(result: dict[str, Any], name: str, head: str, line: Any) -> list[str]:
    rows = result.get(name)
    return ["", head, *map(line, rows)] if isinstance(rows, list) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _ours(row: dict[str, Any]) -> str:
    return f"ours, the rows of {row['peer']}, {row['adapters']} adapters: {row['tokens_per_s']:.0f} tokens/s"


def _kernel(row: dict[str, Any]) -> str:
    sizes = f"{row['kernel']:<22}{row['batch']:>5}{row['tokens']:>7}{row['adapters']:>9}"
    if "failed" in row:
        return f"{sizes}  failed: {row['failed']}"
    return f"{sizes}{row['us']:>11.1f}{row['floor_us']:>8.1f}{row['fraction']:>10.0%}"


def _decoding(row: dict[str, Any]) -> str:
    sizes = (
        f"{row['batch']:>5}{row['context']:>8}{row['adapters']:>9}{row['step_ms']:>10.2f}{row['base_step_ms']:>9.2f}"
    )
    smaller = f" instead of a context of {row['instead_of_context']}" if row.get("instead_of_context") else ""
    return f"{sizes}{row['of_base']:>9.1%} ({row['of_base_from']:.1%}, {row['of_base_to']:.1%}){smaller}"


def _job(row: dict[str, Any]) -> str:
    sizes = f"{row['adapters']:>8}{'yes' if row['draws'] else 'no':>7}{row['output_tokens_per_s']:>12.0f}"
    steps = f"{row['num_steps']:>7}{row['steps_with_prompts']:>14.0%}"
    shares = (row[f"{kind}_steps_by_graph"] for kind in ("decode", "mixed"))
    graphs = "".join(f"{'-' if share is None else f'{share:.0%}':>12}" for share in shares)
    return f"{sizes}{steps}{graphs}{row['host_waits_s']:>14.2f}"


def _point(row: dict[str, Any]) -> str:
    of_base = f"{row['decode_of_base']:>8.0%}" if "decode_of_base" in row else ""
    return (
        f"{row['batch']:>5}{row['prompt_tokens']:>8}{row['adapters']:>9}{row['rank'] or '-':>7}{row['mode']:>10}"
        f"{row['prefill_tokens_per_s']:>13.0f}{row['decode_tokens_per_s']:>12.0f}{row['step_ms']:>10.2f}{of_base}"
    )


def _layer(row: dict[str, Any]) -> str:
    return f"{row['batch']:>5}{row['adapters']:>10}{row['rank'] or '-':>7}{row['us']:>10.1f}{row['of_base']:>8.0%}"
