#!/bin/sh
# One call on a lent GPU machine: sh benchmarks/gpu/call.sh OUT SECONDS [options of lorabatch.benchmarks.gpu]
#
# In the root of a checkout that is not installed. OUT: a folder that is brought back, of which the newest archive of all
# results stays small however the call ends. WORK (a temporary folder unless set): results, compiled kernels. With the
# same WORK and `--resume`, a second call goes on at the first section that the first one lacks. What is wrong is checked
# again without a side stream, and by compute-sanitizer.
OUT=$1 SECONDS_LEFT=$2
shift 2
: "${WORK:=$(mktemp -d)}"
FOUND=$WORK/found
mkdir -p "$FOUND" "$WORK/path"
ln -sfn "$PWD" "$WORK/path/lorabatch"
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR="$WORK/triton" PYTHONPATH="$WORK/path"
RUN="python3 -m lorabatch.benchmarks.gpu"
{
    nvidia-smi
    nproc
    free -g
    df -h "$WORK"
    # the extension modules alone, by gcc: nothing is installed
    ls kernels/native/_avx*.so || python3 setup.py build_ext --inplace
} >"$FOUND/machine.txt" 2>&1
(while sleep 10; do tar czf "$WORK/part.tgz" -C "$FOUND" . && mv "$WORK/part.tgz" "$OUT/found.tgz"; done) 2>/dev/null &
ARCHIVING=$!
timeout -k 5 $((SECONDS_LEFT + 45)) $RUN --json "$FOUND/result.json" --seconds "$SECONDS_LEFT" "$@" \
    >"$FOUND/table.txt" 2>>"$FOUND/errors.txt"
CODE=$?
if grep -q '^wrong' "$FOUND/errors.txt"; then
    LORABATCH_SIDE_STREAM=0 timeout -k 5 70 $RUN --only problems --seconds 45 --json "$FOUND/one-stream.json"
    timeout -k 5 60 $RUN --only sanitizer --seconds 50 --json "$FOUND/sanitizer-again.json"
fi 2>>"$FOUND/errors.txt"
kill $ARCHIVING
tar czf "$OUT/found.tgz" -C "$FOUND" .
cp "$FOUND/result.json" "$OUT/"
grep -v '^  ' "$FOUND/errors.txt" | tail -60
tail -100 "$FOUND/table.txt"
exit $CODE
