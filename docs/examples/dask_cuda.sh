#!/usr/bin/env bash
# One machine, one worker per GPU. Not run by the tests: needs GPUs and dask-cuda.
set -euo pipefail
dask scheduler --host 127.0.0.1 --port 8786 --no-dashboard &
scheduler=$!
# One thread: engines are processes of their own. No memory limit: it would apply to the worker, not to the engine.
dask cuda worker tcp://127.0.0.1:8786 --nthreads 1 --memory-limit 0 &
workers=$!
trap 'kill $workers $scheduler' EXIT
lorabatch run --cluster tcp://127.0.0.1:8786 --model "$MODEL" --adapters "$ADAPTERS" --input "$INPUT" --output "$OUTPUT"
