"""The real command line, with echo engines in place of real ones."""

from lorabatch.cli import main
from lorabatch.pipeline import run, submit

if __name__ == "__main__":
    assert run.run.__kwdefaults__ is not None
    run.run.__kwdefaults__["engine_factory"] = "echo_engine:EchoEngine"
    submit.submit.__defaults__ = ("echo_engine:EchoEngine", None)
    main()
