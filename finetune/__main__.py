"""`python -m finetune`, and the command `finetune`."""

import atexit
import os
import sys
import threading


def run() -> None:
    """Run the command line; Ctrl-C may come while it is still being imported."""
    try:
        from finetune.cli.app import main

        main()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):  # Python prints it
            raise
        code = int(end.code or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    leave(code)


def leave(code: int) -> None:
    """End the process as Python does: threads, exit functions, streams; but nothing is freed.

    Python would look for garbage among the millions of objects of torch and Transformers, for
    seconds. Where nobody reads a stream any more, it says so itself, with a code of its own.
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)
    os._exit(code)


if __name__ == "__main__":
    run()
