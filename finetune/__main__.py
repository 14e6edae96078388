"""`python -m finetune`. Ctrl-C may come while the command line is still being imported."""

import sys

if __name__ == "__main__":
    try:
        from finetune.cli.app import main

        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
