"""Run the command line: `python -m xgpt`."""

from xgpt.cli import main

if __name__ == "__main__":
    main()
