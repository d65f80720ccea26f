"""A client process to be killed: `python echo_run.py OPTIONS.json` runs the job in the file with echo engines."""

import json
import sys
from pathlib import Path

from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.run import run


def main() -> None:
    options = json.loads(Path(sys.argv[1]).read_text())
    run(JobSpec(**options), engine_factory="echo_engine:EchoEngine")


if __name__ == "__main__":
    main()
